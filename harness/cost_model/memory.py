"""The prediction of one rank's memory from configuration, layout and its engine's widths. Imports no torch.

The allocator's fragmentation and what NCCL needs outside torch's allocator are left out. On a CPU the copies are
included that gloo makes while it gathers and reduces; when its threads free them late, a run needs more. The tensors
that tensor and pipeline parallelism keep were checked on CPU; for CUDA they are derived.
"""

import dataclasses
from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.cost_model.rank_memory import RankStep, highest_rank, rank_steps
from harness.cost_model.sharding import Sharding
from harness.cost_model.tape import Bytes
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_pp_rank
from harness.layout.state_widths import STATE_KINDS, StateWidths

# The workspaces of cuBLAS, which torch takes from its own allocator on CUDA, by torch's CublasHandlePool.cpp
# (parseChosenWorkspaceSize): ":4096:2:16:8" on devices before compute capability 9, where the plan of the stack harness
# is 48 MiB too high, and 32 MiB on later ones. CUBLAS_WORKSPACE_CONFIG changes it, and cuBLASLt has the same workspace
# unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0. There is one for each handle and stream (setWorkspaceForHandle), and a
# thread has a handle of its own: that of forward, and the one in which autograd runs backward. Products run in the
# default stream alone.
CUBLAS_WORKSPACE_BYTES = (8 * 2**20 + 128 * 2**10, 32 * 2**20)
WORKSPACE_BYTES = 2 * CUBLAS_WORKSPACE_BYTES[1]  # allocated from a rank's first products to its end

# Bytes outside torch's allocator. cpu: resident size of a rank after three steps of DeepSpeed ZeRO-3 on a 66 kB model
# (psutil's rss, torch 2.13, DeepSpeed 0.19.8: 0.399e9; plain torch 0.343e9). cuda: in use on one H200
# beside torch's allocator, with NCCL (torch 2.11, CUDA 13: 1.39e9, and 1.80e9 under DeepSpeed's stages 1 and 2).
PROCESS_BYTES = {"cpu": 400_000_000, "cuda": 1_800_000_000}


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes of one rank, each part at its own maximum; `at_peak` has the parts at the moment of the peak."""

    parameter_bytes: int  # at rest between steps
    gradient_bytes: int  # once they are reduced, those on the host included
    optimizer_bytes: int
    activation_bytes: int  # the most kept for backward, log-probabilities included
    loss_bytes: int  # logits and cross-entropy
    communication_buffer_bytes: int
    host_bytes: int  # offloaded to the host, pinned; 0 on a CPU, where it is part of all else
    process_bytes: int  # interpreter, libraries, context: outside torch's allocator; only for whether it fits a host
    at_peak: Bytes
    rank: int = 0  # the first of the world's ranks at this place of the pipeline
    phase: str = "backward"  # in which it peaks: forward, backward or optimizer

    @property
    def peak_bytes(self) -> int:
        """The bytes that torch's allocator holds at the worst moment of a step."""
        return sum(self.at_peak.values())

    @property
    def state_at_peak_bytes(self) -> int:
        """The bytes of model state on the device at that moment, which are counted and not estimated."""
        return sum(self.at_peak.get(kind, 0) for kind in STATE_KINDS)

    @property
    def needed_bytes(self) -> int:
        """The bytes that a device must have: of tensors, and outside torch's allocator."""
        return self.peak_bytes + self.process_bytes


def estimate_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device = "cpu") -> MemoryEstimate:
    """Return the memory of the rank with the highest peak.

    `device` is cpu or cuda: torch keeps different tensors on each. Model state is ZeRO's (arXiv 1910.02054, section 5).
    The peak is the worst moment of the step's backwards (at a loss, at a head, in a layer, in its attention, or at
    an end), or it is the optimizer's. Raises UserError if the global batch leaves a remainder.
    """
    highest = rank_estimate(*highest_rank(rank_steps(config, layout, widths, device)))
    workspaces = {"workspaces": WORKSPACE_BYTES} if device == "cuda" else {}
    return dataclasses.replace(highest, at_peak=highest.at_peak | workspaces)


def rank_estimate(step: RankStep, pp_rank: int) -> MemoryEstimate:
    """Return the memory of a rank of the pipeline that has this step."""
    own, peak = step.sharding, step.peak(pp_rank)
    buffers = [moment.parts["buffers"] for tape in step.tapes.values() for moment in tape.moments]
    state = own.parameter_bytes + own.optimizer_bytes + sum(own.host_gradients) + own.widths.host_buffer_bytes
    on_host = state - sum(step.state.values()) + step.most_offloaded(pp_rank)
    return MemoryEstimate(
        own.parameter_bytes,
        sum(own.shards(own.widths.gradients, "gradients")) + sum(own.host_gradients),
        own.optimizer_bytes,
        activation_bytes=step.most_saved(pp_rank),
        loss_bytes=sum(stage.loss_bytes for stage in own.activations),
        communication_buffer_bytes=own.buffer_bytes + max(buffers, default=0),
        host_bytes=on_host * (not own.is_cpu),
        process_bytes=PROCESS_BYTES["cpu" if own.is_cpu else "cuda"],
        at_peak=peak.live,
        rank=pp_rank * (own.layout.world_size // own.layout.pp),
        phase=peak.phase,
    )


def saved_bytes(config: RunConfig, layout: Layout, device: Device, pp_rank: int) -> tuple[int, int]:
    """Return the most that this rank of the pipeline keeps for backward, log-probabilities included.

    The second number is the most that activation offload keeps on the host; 0 without it.
    """
    stages = stages_of_pp_rank(config.model, layout, pp_rank)
    step = RankStep(Sharding(config, layout, StateWidths(0, 0, 0, 0, 0), device, stages))
    return step.most_saved(pp_rank), step.most_offloaded(pp_rank)
