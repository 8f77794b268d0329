"""The bytes that data-parallel ranks send in a step: the papers' volumes, and the same with a library's padding."""

import math
from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, local_numel, local_shapes
from harness.layout.state_widths import StateWidths

FLAT_ALIGNMENT = 2  # elements a rank, to which DeepSpeed's stages 1 and 2 pad a group (nccl_start_alignment_factor)


def ring_fraction(ranks: int) -> float:
    """Return the share that a rank sends of all bytes that are gathered or scattered among so many ranks."""
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class SentElements:
    """The elements of a stage's whole parameters that move in a step, each as often as it does."""

    gathered: float
    reduced: float


def even_elements(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage) -> SentElements:
    """Return the elements of the papers, in which every rank has an even share of every parameter."""
    shares = local_numel(config.model, layout, stage)
    reductions = reductions_per_step(config, layout)
    return SentElements(
        gathered=sum(gathers_per_step(config, layout, widths, name) * share for name, share in shares.items()),
        reduced=reductions * sum(shares.values()),
    )


def padded_elements(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage, rank: int) -> SentElements:
    """Return the elements that this rank moves, with its own part of every parameter and the padding of the shards.

    `widths.padding` says what is padded to a multiple of the shards' number. rows: the first dimension of every
    parameter (fully_shard: torch.distributed.fsdp._fully_shard._fsdp_collectives). elements: every flat parameter
    (DeepSpeed's stage 3: partition_parameters.py, reduce_scatter_coalesced). partition: the flat buffer of all
    parameters that stages 1 and 2 gather, and no gradient (stage_1_and_2.py, flatten_dense_tensors_aligned).
    """
    shards = layout.axes_size(layout.sharding_axes)
    sizes = {name: math.prod(shape) for name, shape in local_shapes(config.model, layout, stage, rank).items()}
    if widths.padding == "rows":
        for name, (rows, *rest) in local_shapes(config.model, layout, stage, rank).items():
            sizes[name] = _round_up(rows, shards) * math.prod(rest)
    elif widths.padding == "elements":
        sizes = {name: _round_up(size, shards) for name, size in sizes.items()}
    gathered = sum(gathers_per_step(config, layout, widths, name) * size for name, size in sizes.items())
    if widths.padding == "partition":
        last = list(sizes.values())[-1]
        unaligned = sum(_round_up(size, widths.parameter_alignment) for size in sizes.values())
        unaligned += last - _round_up(last, widths.parameter_alignment)
        gathered = _round_up(unaligned, FLAT_ALIGNMENT * shards)
    return SentElements(gathered, reductions_per_step(config, layout) * sum(sizes.values()))


def dp_bytes(
    config: RunConfig, layout: Layout, widths: StateWidths, elements: SentElements
) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank sends along the data-parallel axes, by the names of axes and by gather or reduce.

    The volume is ZeRO's (arXiv 1910.02054, section 7), with hybrid sharding from its operators (arXiv 2304.11277).
    Stages 0 and 1 synchronize once a step, stages 2 and 3 reduce-scatter every micro-batch; replicas of shards
    synchronize once.
    """
    shards, replicas = layout.axes_size(layout.sharding_axes), layout.axes_size(layout.replica_axes)
    along_shards, along_replicas = layout.group_name(*layout.sharding_axes), layout.group_name(*layout.replica_axes)
    reduce_bytes = config.precision.reduce_bytes
    reductions = reductions_per_step(config, layout)
    sent = {
        (along_shards, "gather"): ring_fraction(shards) * elements.gathered * widths.gathered,
        (along_shards, "reduce"): ring_fraction(shards) * elements.reduced * reduce_bytes if layout.zero_stage else 0.0,
        (along_replicas, "reduce"): 2 * ring_fraction(replicas) * elements.reduced / reductions * reduce_bytes / shards,
    }
    return {key: volume for key, volume in sent.items() if key[0]}


def reductions_per_step(config: RunConfig, layout: Layout) -> int:
    """Return how often a step reduces each gradient: once, or in stages 2 and 3 in every micro-batch."""
    return layout.grad_accumulation_steps(config.train) if layout.zero_stage >= 2 else 1


def gathers_per_step(config: RunConfig, layout: Layout, widths: StateWidths, name: str) -> int:
    """Return how often a step gathers this parameter when none is cached between uses.

    Stages 1 and 2 gather it once. Stage 3 gathers it twice in every micro-batch. Where each use gathers, a parameter of
    a recomputed layer, even of a selectively recomputed one, is gathered a third time; the layer's last projection is
    an exception, before which the recomputation stops unless dropout follows it. A tied embedding has two uses.
    """
    if layout.zero_stage < 3:
        return min(1, layout.zero_stage)
    model, profile, uses = config.model, model_profile(config.model), 1
    layer = profile.layer_index(name)
    is_recomputed = layer is not None and config.checkpointing.recomputes_layer(layer)
    runs_again = model.dropout > 0 or profile.recomputes_to_end(name.rpartition(".")[0])
    if widths.gathers_for_each_use and is_recomputed and runs_again:
        return layout.grad_accumulation_steps(config.train) * 3
    if widths.gathers_for_each_use and name == tied_matrix(model):
        uses = 2
    return layout.grad_accumulation_steps(config.train) * 2 * uses


def tied_matrix(model: ModelConfig) -> str | None:
    """Return the name of the matrix that is both embedding and head; None if they are two."""
    matrix = (model.vocab_size, model.hidden_size)
    tables = model_profile(model).embedding_shapes.items() if model.tie_word_embeddings else ()
    return next((name for name, shape in tables if shape == matrix), None)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
