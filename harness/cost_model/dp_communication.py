"""The bytes that a rank sends along the axes of data: parameters gathered and gradients reduced. No torch."""

import math
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, RunConfig
from harness.cost_model.optimizer_state import BF16_BYTES, gathered_updates
from harness.cost_model.ring import ring_fraction
from harness.cost_model.zero_plus_plus import exchanged_bytes, parameter_bytes
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, fsdp_rows, is_expert_weight, local_numel, local_shapes
from harness.layout.state_widths import StateWidths

FLAT_ALIGNMENT = 2  # elements a rank, to which DeepSpeed's stages 1 and 2 pad a group (nccl_start_alignment_factor)


def sent_elements(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None = None,
    of_experts: bool | None = None,
) -> tuple[float, float]:
    """Return the elements of a stage's whole parameters that are gathered and reduced in a step, each time counted.

    They are the papers', in which every rank has an even share, or a rank's, which moves its own part of every
    parameter, and the padding of the shards. They are those of experts, of all other parameters, or of both.
    """
    width = config.precision.compute_bytes
    narrow = config.gathered_matrix_bytes(width) / width
    key = (config.model, config.checkpointing, layout, widths, stage, rank, of_experts, narrow)
    gathered, reduced = _sent_elements_once(*key)
    gatherings = layout.grad_accumulation_steps(config.train) if gathers_often(layout, widths) else 1
    return gatherings * gathered, reductions_per_step(config, layout, widths) * reduced


@lru_cache(maxsize=1024)
def _sent_elements_once(
    model: ModelConfig,
    checkpointing: CheckpointingConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None,
    of_experts: bool | None,
    narrow: float,
) -> tuple[float, float]:
    """Return the elements of one gathering and one reduction; a gathered matrix of a layer counts as `narrow` of its.

    `widths.padding` says what is padded to a multiple of the shards' number. rows: the first dimension of every
    parameter (fully_shard: torch.distributed.fsdp._fully_shard._fsdp_collectives). elements: every flat parameter
    (DeepSpeed's stage 3: partition_parameters.py, reduce_scatter_coalesced). partition: the flat buffer of all
    trained parameters that stages 1 and 2 gather, and no gradient (stage_1_and_2.py, flatten_dense_tensors_aligned).
    """
    own, padding = layout.of_experts if of_experts else layout, "none" if rank is None else widths.padding
    shards = own.axes_size(own.sharding_axes)
    sizes: dict[str, float] = dict(local_numel(model, layout, stage))
    if rank is not None:
        shapes, multiple = local_shapes(model, layout, stage, rank), shards if padding == "rows" else 1
        sizes = {}
        for name, shape in shapes.items():
            rows, row = fsdp_rows(shape, multiple)
            sizes[name] = _round_up(rows, multiple) * row
    if of_experts is not None:
        sizes = {name: size for name, size in sizes.items() if is_expert_weight(name) == of_experts}
    if padding == "elements":
        sizes = {name: _round_up(size, shards) for name, size in sizes.items()}
    trained = [size for name, size in sizes.items() if model.adapter.trains(name)]
    matrices = {f"{each.base_path}.weight" for each in model_profile(model).layer_matrices}
    shares = {name: narrow if name.split(".", 2)[-1] in matrices else 1.0 for name in sizes}
    gathered = sum(gathers(model, checkpointing, layout, widths, name) * shares[name] * sizes[name] for name in sizes)
    if padding == "partition":
        *others, last = trained
        aligned = sum(_round_up(size, widths.parameter_alignment) for size in others)
        gathered = _round_up(aligned + last, FLAT_ALIGNMENT * shards)
    return gathered, sum(trained)


def dp_bytes(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None,
    passes: int,
    of_experts: bool | None,
) -> dict[str, float]:
    """Return the bytes that a rank sends along the data-parallel axes, by the names of axes and by gather or reduce.

    The volume is ZeRO's (arXiv 1910.02054, section 7), with hybrid sharding from its operators (arXiv 2304.11277).
    Stages 0 and 1 synchronize once a step, stages 2 and 3 reduce-scatter every micro-batch; replicas of shards
    synchronize once. A reduction goes through the ring so many times. Experts that expert parallelism divides are
    gathered and reduced among the ranks that have the same ones.
    """
    _, reduced = sent_elements(config, layout, widths, stage, rank, of_experts)
    among_all, among_few = gathered_bytes(config, layout, widths, stage, rank, of_experts)
    among_all += sum(gathered_updates(config, layout, stage, is_padded=rank is not None)) * BF16_BYTES
    own = layout.of_experts if of_experts else layout
    shards, replicas = own.axes_size(own.sharding_axes), own.axes_size(own.replica_axes)
    along_shards, along_replicas = own.group_name(*own.sharding_axes), own.group_name(*own.replica_axes)
    reduce_bytes, reductions = config.precision.reduce_bytes, reductions_per_step(config, layout, widths)
    sums = layout.grad_accumulation_steps(config.train) if widths.repeats_in_micro_batches else 1
    exchanged = 0.0
    if widths.exchange_devices:
        shapes = local_shapes(config.model, layout, stage, rank or 0).values()
        exchanged = reductions * sum(exchanged_bytes(shapes, shards, widths.exchange_devices))
        reduced = reductions * sum(math.prod(shape) for shape in shapes if len(shape) == 1)
    sent = {
        (along_shards, "gather"): (
            ring_fraction(shards) * among_all + ring_fraction(layout.secondary_shards) * among_few
        ),
        (along_shards, "reduce"): passes * ring_fraction(shards) * reduced * reduce_bytes * (layout.zero_stage > 0),
        (along_shards, "all_to_all"): exchanged,
        (along_replicas, "reduce"): 2 * ring_fraction(replicas) * sums * reduced / reductions * reduce_bytes / shards,
    }
    return {f"{axes} {kind}": volume for (axes, kind), volume in sent.items() if axes}


def gathered_bytes(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None = None,
    of_experts: bool | None = None,
) -> tuple[float, float]:
    """Return the bytes of whole parameters that a step gathers among all ranks of shards, and among secondary ones.

    Secondary shards serve all gatherings but the first one of a micro-batch, or where they last until the update, of a
    step (ZeRO++, arXiv 2306.10209, section 3.2).
    """
    if widths.quantizes_gathers:
        return _quantized_gathered_bytes(config, layout, widths, stage)
    gathered, reduced = sent_elements(config, layout, widths, stage, rank, of_experts)
    once = reduced / (reductions_per_step(config, layout, widths) if widths.keeps_secondary_shards else 1)
    among_few = gathered - once if layout.secondary_shards > 1 else 0.0
    return (gathered - among_few) * widths.gathered, among_few * widths.gathered


def _quantized_gathered_bytes(
    config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage
) -> tuple[float, float]:
    among_all = among_few = 0.0
    micro_batches, parts = layout.grad_accumulation_steps(config.train), layout.secondary_shards
    of_few = parameter_bytes(config, layout, stage, parts)
    for module, size in parameter_bytes(config, layout, stage, layout.dp_shard).items():
        times = gathers(config.model, config.checkpointing, layout, widths, f"{module}.weight") * micro_batches
        once = 1 if parts > 1 else times  # DeepSpeed's secondary shards last until the update
        among_all += once * size
        among_few += (times - once) * of_few[module]
    return among_all, among_few


def reductions_per_step(config: RunConfig, layout: Layout, widths: StateWidths) -> int:
    """Return how often a step reduces each gradient: once, or in stages 2 and 3 in every micro-batch."""
    is_often = layout.zero_stage >= 2 and not widths.reduces_at_end
    return layout.grad_accumulation_steps(config.train) if is_often else 1


def gathers_often(layout: Layout, widths: StateWidths) -> bool:
    """Return whether every micro-batch gathers parameters, and not the step alone."""
    return layout.zero_stage == 3 or (layout.zero_stage == 2 and widths.repeats_in_micro_batches)


def gathers(
    model: ModelConfig, checkpointing: CheckpointingConfig, layout: Layout, widths: StateWidths, name: str
) -> int:
    """Return how often this parameter is gathered in a step, or in stage 3 in a micro-batch, if none is cached.

    Stages 1 and 2 gather it once if it is trained, or if fully_shard divides it. Stage 3 gathers it twice. Where each
    use gathers, a parameter of a recomputed layer, even of a selectively recomputed one, is gathered a third time; the
    layer's last projection is an exception, before which the recomputation stops unless dropout follows it. A tied
    embedding has two uses, a frozen one no backward of its own.
    """
    if layout.zero_stage < 3:
        return min(1, layout.zero_stage) * (layout.data_parallel == "fsdp" or model.adapter.trains(name))
    profile = model_profile(model)
    without_backward = model.adapter.is_enabled and name in profile.embedding_shapes
    if not widths.gathers_for_each_use:
        return 2 - (without_backward and not model.tie_word_embeddings)
    layer = profile.layer_index(name)
    is_recomputed = layer is not None and checkpointing.recomputes_layer(layer)
    if is_recomputed and (model.dropout > 0 or profile.recomputes_to_end(name.rpartition(".")[0])):
        return 3
    shapes, matrix = profile.embedding_shapes, (model.vocab_size, model.hidden_size)
    tables = (table for table in shapes if shapes[table] == matrix)
    return (4 if model.tie_word_embeddings and name == next(tables, None) else 2) - without_backward


def _round_up(size: float, multiple: int) -> float:
    return -(-size // multiple) * multiple
