"""The prediction of memory under another implementation, from its stack's data. Imports no torch.

For the stack `harness` it is the exact model of harness.cost_model.memory. For others a rank's peak is the highest of
a few moments of a step: at the loss, when backward enters the last layer, at the end of a backward, and in the step of
the optimizer. Model state is ZeRO's (arXiv 1910.02054, section 5) at the stack's widths, activations are those of
harness.cost_model.stack_moments. Left out are tensors that do not grow with the batch or the model, such as the
state of random generators, and the contexts of CUDA and NCCL.
"""

import math
from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.config.stack import StackConfig, StackMemory
from harness.config.strategy import MODEL_AXES
from harness.cost_model.memory import CUBLAS_WORKSPACE_BYTES, PROCESS_BYTES, MemoryEstimate, estimate_memory
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.stack_moments import model_state, play_stack
from harness.cost_model.stack_parameters import rank_parts
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.util.errors import UserError

HOPPER = 9  # the compute capability from which cuBLAS and Transformer Engine take larger workspaces

SEGMENT_BYTES = 2 * 2**20  # torch's allocator takes large segments in multiples of this (c10, kRoundLarge)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank of the pipeline."""

    estimate: MemoryEstimate
    resting_bytes: int  # allocated between steps
    reserved_bytes: int  # the most that torch's allocator takes from the device


def predict_memory(
    config: RunConfig,
    layout: Layout,
    stack: StackConfig,
    widths: StateWidths | None = None,
    compute_capability: int = HOPPER,
) -> MemoryEstimate:
    """Return the memory of the rank with the highest peak on a GPU, as predict_highest_rank has it."""
    return predict_highest_rank(config, layout, stack, widths, compute_capability).estimate


def predict_highest_rank(
    config: RunConfig,
    layout: Layout,
    stack: StackConfig,
    widths: StateWidths | None = None,
    compute_capability: int = HOPPER,
) -> RankMemory:
    """Return the memory of the rank with the highest peak, with its bytes at rest and those that torch reserves.

    `widths` are those of the engine, which the stack `harness` needs and others do not have. Raises UserError for a
    layout that the model or the global batch does not divide into or that the stack does not have, ValueError for the
    stack `harness` without widths.
    """
    if stack.memory.kind != "harness":
        require_expressible(config, layout, stack)
        return max(
            (predict_rank_memory(config, layout, stack, rank, compute_capability) for rank in ranks(layout)),
            key=lambda memory: memory.estimate.peak_bytes,
        )
    if widths is None:
        raise ValueError("the stack harness needs its engine's widths")
    return own_memory(stack.memory, estimate_memory(config, layout, widths, "cuda"), "cuda")


def own_memory(memory: StackMemory, estimate: MemoryEstimate, device: Device) -> RankMemory:
    """Return a rank's memory with the stack `harness`; a CPU's allocator takes nothing beyond what is requested."""
    lasting = (estimate.at_peak.get(part, 0) for part in ("parameters", "optimizer", "workspaces"))
    reserved = estimate.peak_bytes if device == "cpu" else reserved_bytes(memory, estimate, 0, 0)
    return RankMemory(estimate, sum(lasting), reserved)


def require_expressible(config: RunConfig, layout: Layout, stack: StackConfig) -> None:
    """Raise UserError for a model whose layers the stack does not know, and for a layout that it does not have."""
    if config.model.family == "hf":
        raise UserError(
            f"stack={stack.name} knows the layers of model.family=llama and gpt, not those of model.name="
            f"{config.model.name}: choose stack=harness"
        )
    stages = stack.memory.zero_stages
    if layout.zero_stage not in stages:
        choice = ", ".join(map(str, stages))
        raise UserError(
            f"strategy.zero_stage={layout.zero_stage} does not exist in stack={stack.name}: choose {choice}"
        )
    only_here = {
        "strategy.offload": (layout.offload, "none"),
        "checkpointing": (config.checkpointing.name, "none, full, every_n or attention"),
        "checkpointing.offload_activations": (config.checkpointing.offload_activations, "false"),
    }
    for key, (value, choices) in only_here.items():
        if value in ("optimizer", "parameters", "selective", True):
            raise UserError(f"{key}={value} does not exist in stack={stack.name}: choose {choices}")
    if not stack.memory.has_model_parallelism:
        for axis in MODEL_AXES:
            if layout.axis_sizes[axis] > 1:
                degree = layout.axis_sizes[axis]
                raise UserError(f"strategy.{axis}={degree} does not exist in stack={stack.name}: choose 1")


def ranks(layout: Layout) -> tuple[int, ...]:
    """Return the ranks of the pipeline of which one has the highest peak: those at its ends and beside them.

    Between them, a stage has as many layers or one less, and keeps fewer micro-batches the later it comes, unless
    strategy.layers_per_stage says otherwise.
    """
    if layout.layers_per_stage is not None:
        return tuple(range(layout.pp))
    return tuple(sorted({0, min(1, layout.pp - 1), max(0, layout.pp - 2), layout.pp - 1}))


def predict_rank_memory(
    config: RunConfig, layout: Layout, stack: StackConfig, pp_rank: int, compute_capability: int = HOPPER
) -> RankMemory:
    """Return the memory of this rank of the pipeline under a stack other than `harness`.

    Raises UserError for a layout that the model or the global batch does not divide into.
    """
    memory = stack.memory
    parts = rank_parts(config.model, layout, memory, pp_rank)
    shape = micro_batch_shape(config, layout, "cuda")
    state = model_state(config, layout, memory, parts)
    workspaces = workspace_bytes(memory, compute_capability)
    tape = play_stack(config, layout, memory, parts, shape, state, pp_rank)
    moments, highest = [moment.parts for moment in tape.moments], tape.highest
    resident = {"parameters": state.parameters, "optimizer": state.optimizer, "workspaces": workspaces}
    estimate = MemoryEstimate(
        state.parameters,
        max(state.main_gradients, state.gradients),
        state.optimizer,
        activation_bytes=max(moment["activations"] for moment in moments),
        loss_bytes=max(moment["loss"] for moment in moments),
        communication_buffer_bytes=max(moment["buffers"] for moment in moments),
        host_bytes=0,
        process_bytes=PROCESS_BYTES["cuda"],
        at_peak=resident | highest.parts,
        rank=pp_rank * (layout.world_size // layout.pp),
        phase=highest.phase,
    )
    chunks = len(parts.chunks) if layout.pp_enabled else 0
    resting = sum(resident.values()) + state.at_rest + memory.pipeline_tensors_at_rest * chunks * shape.hidden_bytes
    present = highest.parts["gradients"] - state.main_gradients if state.main_gradients else state.gradients
    collectives = 0
    if shape.sequence_parallel and not layout.pp_enabled:
        collectives = memory.collective_tensors * sum(parts.chunks) * shape.whole_hidden_bytes
    absent_gradients = max(0, state.gradients - present)
    return RankMemory(estimate, resting, reserved_bytes(memory, estimate, absent_gradients, collectives))


def workspace_bytes(memory: StackMemory, compute_capability: int) -> int:
    """Return the workspaces of cuBLAS, and of the layers' own library, which live from the first products on."""
    newer = compute_capability >= HOPPER
    handle = CUBLAS_WORKSPACE_BYTES[newer] if memory.cublas_workspace_bytes is None else memory.cublas_workspace_bytes
    return memory.cublas_handles * handle + memory.library_workspace_bytes[newer]


def reserved_bytes(memory: StackMemory, estimate: MemoryEstimate, absent_gradients: int, collectives: int) -> int:
    """Return the most that torch's allocator takes from the device: what is allocated, and what it cannot use again.

    `absent_gradients` are the 16-bit gradients that do not exist at the peak: as large as weights, they have segments
    other than those of activations, which are as large as a micro-batch. `collectives` are the tensors that collectives
    of a forward read: their segments are not used again before the host sees that they have ended (torch's
    ProcessGroupNCCL records its stream), and the host is a micro-batch ahead unless it waits for a pipeline's
    transfers. They are part of the segments of activations and temporaries of which no tensor makes use, of which
    otherwise the stack has a share.
    """
    at_peak = estimate.at_peak
    dynamic = sum(at_peak.get(name, 0) for name in ("activations", "loss", "temporaries"))
    total = estimate.peak_bytes + absent_gradients + max(dynamic * memory.fragmentation, collectives)
    return math.ceil(total / SEGMENT_BYTES) * SEGMENT_BYTES
