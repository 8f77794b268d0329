"""The bytes that data-parallel ranks send in a step: the papers' volumes, and the same with a library's padding."""

import math
from dataclasses import dataclass
from functools import lru_cache

from harness.config.checkpointing import CheckpointingConfig
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


def sent_elements(
    config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage, rank: int | None = None
) -> SentElements:
    """Return the elements that move in a step, by the papers, in which every rank has an even share, or by a rank.

    A rank moves its own part of every parameter, and the padding of the shards.
    """
    once = _sent_elements_once(config.model, config.checkpointing, layout, widths, stage, rank)
    gatherings = layout.grad_accumulation_steps(config.train) if layout.zero_stage == 3 else 1
    return SentElements(gatherings * once.gathered, reductions_per_step(config, layout) * once.reduced)


@lru_cache(maxsize=1024)
def _sent_elements_once(
    model: ModelConfig,
    checkpointing: CheckpointingConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None,
) -> SentElements:
    """Return the elements of one gathering and one reduction.

    `widths.padding` says what is padded to a multiple of the shards' number. rows: the first dimension of every
    parameter (fully_shard: torch.distributed.fsdp._fully_shard._fsdp_collectives). elements: every flat parameter
    (DeepSpeed's stage 3: partition_parameters.py, reduce_scatter_coalesced). partition: the flat buffer of all
    parameters that stages 1 and 2 gather, and no gradient (stage_1_and_2.py, flatten_dense_tensors_aligned).
    """
    shards, padding = layout.axes_size(layout.sharding_axes), "none" if rank is None else widths.padding
    sizes: dict[str, float] = dict(local_numel(model, layout, stage))
    if rank is not None:
        shapes, multiple = local_shapes(model, layout, stage, rank), shards if padding == "rows" else 1
        sizes = {name: _round_up(rows, multiple) * math.prod(rest) for name, (rows, *rest) in shapes.items()}
    if padding == "elements":
        sizes = {name: _round_up(size, shards) for name, size in sizes.items()}
    gathered: float = sum(gathers(model, checkpointing, layout, widths, name) * size for name, size in sizes.items())
    if padding == "partition":
        *others, last = sizes.values()
        aligned = sum(_round_up(size, widths.parameter_alignment) for size in others)
        gathered = _round_up(aligned + last, FLAT_ALIGNMENT * shards)
    return SentElements(gathered, sum(sizes.values()))


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


def gathers(
    model: ModelConfig, checkpointing: CheckpointingConfig, layout: Layout, widths: StateWidths, name: str
) -> int:
    """Return how often this parameter is gathered in a step, or in stage 3 in a micro-batch, if none is cached.

    Stages 1 and 2 gather it once. Stage 3 gathers it twice. Where each use gathers, a parameter of a recomputed layer,
    even of a selectively recomputed one, is gathered a third time; the layer's last projection is an exception, before
    which the recomputation stops unless dropout follows it. A tied embedding has two uses.
    """
    if layout.zero_stage < 3:
        return min(1, layout.zero_stage)
    if not widths.gathers_for_each_use:
        return 2
    profile = model_profile(model)
    layer = profile.layer_index(name)
    is_recomputed = layer is not None and checkpointing.recomputes_layer(layer)
    if is_recomputed and (model.dropout > 0 or profile.recomputes_to_end(name.rpartition(".")[0])):
        return 3
    return 4 if name == tied_matrix(model) else 2


def tied_matrix(model: ModelConfig) -> str | None:
    """Return the name of the matrix that is both embedding and head; None if they are two."""
    matrix = (model.vocab_size, model.hidden_size)
    tables = model_profile(model).embedding_shapes.items() if model.tie_word_embeddings else ()
    return next((name for name, shape in tables if shape == matrix), None)


def _round_up(size: float, multiple: int) -> float:
    return -(-size // multiple) * multiple
