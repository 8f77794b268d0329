"""The prediction of memory under another implementation, from its stack's data. Imports no torch.

A rank's step has the tape of harness.cost_model.step, with the state, the moments and the activations of
stack_sharding.py. Model state is ZeRO's (arXiv 1910.02054, section 5) at the stack's widths. Left out are tensors that
do not grow with the batch or the model, such as the state of random generators, and the contexts of CUDA and NCCL.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.config.stack import StackConfig, StackMemory
from harness.config.strategy import MODEL_AXES
from harness.cost_model.memory import CUBLAS_WORKSPACE_BYTES, MemoryEstimate, rank_estimate
from harness.cost_model.rank_memory import RankStep, group_ranks, highest_rank
from harness.cost_model.stack_sharding import StackSharding
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, split_into_stages
from harness.layout.refusals import refusals
from harness.layout.state_widths import StateWidths

HOPPER = 9  # the compute capability from which cuBLAS and Transformer Engine take larger workspaces

SEGMENT_BYTES = 2 * 2**20  # torch's allocator takes large segments in multiples of this (c10, kRoundLarge)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank of the pipeline."""

    estimate: MemoryEstimate
    resting_bytes: int  # allocated between steps
    reserved_bytes: int  # the most that torch's allocator usually takes from a device with room for it
    most_reserved_bytes: int  # what it rarely exceeds
    served_bytes: int  # what a device must have: the allocator gives back its cache before it runs out


def predict_highest_rank(
    config: RunConfig, layout: Layout, stack: StackConfig, compute_capability: int = HOPPER
) -> RankMemory:
    """Return the memory of the rank with the highest peak on a GPU, under a stack other than `harness`.

    Raises UserError for a layout that the model or the global batch does not divide into.
    """
    highest = highest_rank(stack_steps(config, layout, stack.memory))
    return stack_rank_memory(*highest, stack.memory, compute_capability)


def own_memory(
    memory: StackMemory, estimate: MemoryEstimate, layout: Layout, widths: StateWidths, device: Device
) -> RankMemory:
    """Return a rank's memory with the stack `harness`; a CPU's allocator takes nothing beyond what is requested.

    On a GPU freed blocks of gathered parameters and of reduced gradients, of other sizes and streams than activations,
    stay reserved beside them, most where each layer is gathered for its use; perhaps as much where the engine makes
    gradients and buckets anew in each step.
    """
    lasting = sum(estimate.at_peak.get(part, 0) for part in ("parameters", "optimizer", "workspaces"))
    if device == "cpu":
        return RankMemory(estimate, lasting, *[estimate.peak_bytes] * 3)
    plain, gathering, peak = memory.fragmentation, memory.gathering_fragmentation, estimate.peak_bytes
    usual = gathering if layout.zero_stage == 3 else plain
    most = memory.most_over_usual * (gathering if widths.renews_buffers else usual)
    shares = (usual, most, memory.lasting_fragmentation)
    return RankMemory(estimate, lasting, *(in_segments(peak + share * (peak - lasting)) for share in shares))


# Of a rank, whose parameters torch keeps whole at once (torch/distributed/pipelining/schedules.py, max_active_stages).
MOST_WHOLE_STAGES = 3


def reduces_at_end(layout: Layout, stack: StackConfig) -> bool:
    """Return whether whole gradients of fully_shard add up in a pipeline's stage, which reduces them once a step."""
    return stack.timing.repeats_in_micro_batches and layout.data_parallel == "fsdp" and layout.pp_enabled


def stack_problems(config: RunConfig, layout: Layout, stack: StackConfig) -> Iterator[str]:
    """Yield why a stack other than `harness` does not have this configuration, a line each."""
    memory, checkpointing = stack.memory, config.checkpointing
    rules = {
        "stack_model": not model_profile(config.model).is_project_decoder,
        "stack_experts": config.model.num_experts > 0 and memory.kind != "harness",
        "stack_zero_stage": layout.zero_stage not in memory.zero_stages,
        "stack_whole_gradients": reduces_at_end(layout, stack)
        and (
            layout.zero_stage == 3
            or layout.virtual_stages > MOST_WHOLE_STAGES
            or layout.ep_enabled
            or layout.offload != "none"
        ),
        "stack_engine": memory.kind == "harness" and layout.engine != "torch",
    }
    if memory.kind != "harness":
        rules |= {
            "stack_adapter": config.model.adapter.is_enabled,
            "stack_optimizer": config.optimizer.name != "adamw",
            "stack_secondary": layout.secondary_shards > 1,
            "stack_offload": layout.offload != "none",
            "stack_context_parallel": layout.exchanges_heads,
            "stack_checkpointing": checkpointing.name == "selective",
            "stack_offload_activations": checkpointing.offload_activations,
        }
    rules |= {f"stack_{axis}": layout.axis_sizes[axis] > 1 and not memory.has_model_parallelism for axis in MODEL_AXES}
    return refusals(rules, config, layout, stack=stack, stages=", ".join(map(str, memory.zero_stages)))


def stack_steps(config: RunConfig, layout: Layout, memory: StackMemory) -> list[RankStep]:
    """Return the steps of the pipeline's ranks under a stack other than `harness`, one for all whose stages are alike.

    It pads the vocabulary by its own rule. No stack has a schedule that splits backward, or a loss in parts. Raises
    UserError for a layout that the model or the global batch does not divide into.
    """
    if layout.schedule != "gpipe":
        layout = dataclasses.replace(layout, schedule="interleaved_1f1b" if layout.virtual_stages > 1 else "1f1b")
    model = padded_model(config.model, layout, memory.vocabulary_multiple)
    config = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, loss_chunks=1))
    ranks = tuple(map(layout.stage_indices, range(layout.pp)))
    alike = group_ranks(stack_stages(model, layout, memory.balance), ranks, config.checkpointing.every)
    return [RankStep(StackSharding(config, layout, memory, stages), pp_ranks) for stages, pp_ranks in alike]


@lru_cache(maxsize=1024)
def padded_model(model: ModelConfig, layout: Layout, vocabulary_multiple: int) -> ModelConfig:
    """Return the model with its vocabulary padded, and with a matrix for each of two ranks that share a tied one.

    Megatron-LM pads the vocabulary to a multiple of make_vocab_size_divisible_by x tp
    (megatron/core/tokenizers/utils/build_tokenizer.py, vocab_size_with_padding).
    """
    multiple = vocabulary_multiple * layout.vocabulary_tp
    rows = -(-model.vocab_size // multiple) * multiple
    is_tied = model.tie_word_embeddings and not layout.pp_enabled
    return dataclasses.replace(model, vocab_size=rows, tie_word_embeddings=is_tied)


@lru_cache(maxsize=4096)
def stack_stages(model: ModelConfig, layout: Layout, balance: str) -> tuple[Stage, ...]:
    """Return the pipeline's stages in order; strategy.layers_per_stage comes before the stack's balance.

    Raises UserError if there are fewer layers than stages.
    """
    count, depth = layout.num_stages, model.num_hidden_layers
    stages = split_into_stages(model, layout)
    if layout.layers_per_stage is not None or balance == "parameters":
        return tuple(stages)
    even = [depth // count + (index < depth % count) for index in range(count)]
    layers = balanced_by_products(model, count) if balance == "products" else even
    return tuple(Stage(index, count, sum(layers[:index]), number) for index, number in enumerate(layers))


def balanced_by_products(model: ModelConfig, count: int) -> list[int]:
    """Return the layers of each stage as nanotron's build_model assigns them (src/nanotron/models/base.py).

    Blocks go to a stage until the cumulative cost passes its share. A layer costs its matrices, the head its own, and
    embedding and norm cost nothing.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    layer_cost = 4 * hidden * hidden + (2 + model.architecture.has_gate) * hidden * inner
    costs = [0, *[layer_cost] * model.num_hidden_layers, 0, model.vocab_size * hidden]
    total, stage, layers = sum(costs), 0, [0] * count
    for index, cumulative in enumerate(accumulate(costs)):
        if 1 <= index <= model.num_hidden_layers:
            layers[stage] += 1
        if cumulative > total * (stage + 1) / count:
            stage = min(stage + 1, count - 1)
    return layers


def stack_rank_memory(step: RankStep, pp_rank: int, memory: StackMemory, compute_capability: int) -> RankMemory:
    """Return the memory of a rank of the pipeline that has this step, under a stack other than `harness`."""
    own, shape = step.sharding, step.sharding.shape
    workspaces, estimate = workspace_bytes(memory, compute_capability), rank_estimate(step, pp_rank)
    at_peak = step.state | {"workspaces": workspaces} | estimate.at_peak
    estimate = dataclasses.replace(estimate, at_peak=at_peak)
    received = memory.pipeline_tensors_at_rest * len(own.stages) * shape.hidden_bytes * own.layout.pp_enabled
    rests = own.keeps_gradients or (memory.keeps_gradients_at_rest and own.shard_counts["gradients"] > 1)
    is_ahead = shape.sequence_parallel and not own.layout.pp_enabled  # the host, of collectives
    collectives = memory.collective_tensors * own.config.model.num_hidden_layers * shape.whole_hidden_bytes * is_ahead
    absent_gradients = sum(own.gradients) - max(estimate.at_peak["gradients"], sum(own.sums))
    resting = step.lasting_bytes + workspaces + sum(own.sums) * rests + received
    reserved = reserved_bytes(memory, estimate, absent_gradients, collectives)
    return RankMemory(estimate, resting, reserved, reserved, reserved)


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
    return in_segments(total)


def in_segments(size: float) -> int:
    """Return bytes rounded up to whole segments."""
    return math.ceil(size / SEGMENT_BYTES) * SEGMENT_BYTES
