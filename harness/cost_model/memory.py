"""The prediction of one rank's memory from configuration, layout and its engine's widths. Imports no torch.

The allocator's fragmentation and what NCCL needs outside torch's allocator are left out. On a CPU the copies are
included that gloo makes while it gathers and reduces; when its threads free them late, a run needs more. The tensors
that tensor and pipeline parallelism keep were checked on CPU; for CUDA they are derived.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.rank_memory import RankStep, highest_rank, rank_steps
from harness.cost_model.sharding import Sharding
from harness.cost_model.tape import Bytes
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages
from harness.layout.state_widths import STATE_KINDS, StateWidths

# The workspaces of cuBLAS, which torch takes from its own allocator on CUDA, by torch's CublasHandlePool.cpp
# (parseChosenWorkspaceSize): ":4096:2:16:8" on devices before compute capability 9, where the plan of the stack harness
# is 48 MiB too high, and 32 MiB on later ones. CUBLAS_WORKSPACE_CONFIG changes it, and cuBLASLt has the same workspace
# unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0. There is one for each handle and stream (setWorkspaceForHandle), and a
# thread has a handle of its own: that of forward, and the one in which autograd runs backward. Products run in the
# default stream alone.
CUBLAS_WORKSPACE_BYTES = (8 * 2**20 + 128 * 2**10, 32 * 2**20)
WORKSPACE_BYTES = 2 * CUBLAS_WORKSPACE_BYTES[1]  # allocated from a rank's first products to its end

GATED_MATRICES = 3  # of an MLP with a gate: gate, up and down

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
    an end), or it is the optimizer's. For a model whose activations are not known it is the optimizer's alone. Raises
    UserError if the global batch leaves a remainder.
    """
    highest = rank_estimate(*highest_rank(rank_steps(config, layout, widths, device)))
    has_products = device == "cuda" and model_profile(config.model).is_project_decoder
    workspaces = {"workspaces": WORKSPACE_BYTES} if has_products else {}
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
    stages = split_into_stages(config.model, layout)[pp_rank :: layout.pp]
    step = RankStep(Sharding(config, layout, StateWidths(0, 0, 0, 0), device, stages))
    return step.most_saved(pp_rank), step.most_offloaded(pp_rank)


def predicted_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> MemoryEstimate:
    """Return the memory of a model; of a traced one its state as it is, all else as in the nearest decoder."""
    own = estimate_memory(config, layout, widths, device)
    if model_profile(config.model).is_project_decoder:
        return own
    near = estimate_memory(dataclasses.replace(config, model=nearest_decoder(config.model)), layout, widths, device)
    ratio = own.parameter_bytes / near.parameter_bytes
    return dataclasses.replace(
        near,
        parameter_bytes=own.parameter_bytes,
        gradient_bytes=own.gradient_bytes,
        optimizer_bytes=own.optimizer_bytes,
        host_bytes=round(near.host_bytes * ratio),
        at_peak={part: round(size * ratio) if part in STATE_KINDS else size for part, size in near.at_peak.items()},
    )


@lru_cache(maxsize=64)
def nearest_decoder(model: ModelConfig) -> ModelConfig:
    """Return the decoder of this project whose layers are nearest to a traced model's."""
    sides = [(each.outputs, each.inputs) for each in model_profile(model).layer_matrices]
    has_gate = sum(model.intermediate_size in own for own in sides) >= GATED_MATRICES
    # Heads divide the hidden size, and where they are rotated into halves.
    numbers = range(1, model.num_attention_heads + 1)
    heads = max(number for number in numbers if model.hidden_size % (number * (1 + has_gate)) == 0)
    groups = max(number for number in range(1, min(model.num_key_value_heads, heads) + 1) if heads % number == 0)
    return dataclasses.replace(
        model,
        family="llama" if has_gate else "gpt",
        num_attention_heads=heads,
        num_key_value_heads=groups,
        dropout=0.0 if has_gate else model.dropout,
        path=None,
        hf_info=None,
    )
