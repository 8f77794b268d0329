"""The proof that single ranks of a layout hold their shares, where the other ranks are not known."""

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.config.model import ModelConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import STATE_KINDS
from harness.proof.layout import (
    allowed_shard_counts,
    box_numel,
    excess_problems,
    gathered_problems,
    kept_shards,
    rank_shares,
    shard_numel,
)
from harness.records.rank_report import RankReport, StateShard


def share_problems(
    model: ModelConfig, layout: Layout, ranks: Sequence[RankReport], literature: bool = True
) -> list[str]:
    """Return where some of a layout's ranks hold other shards than their shares; the other ranks are not known.

    A rank must hold every element of its shares where they follow from the layout alone, and nothing more.
    """
    problems = gathered_problems(ranks, literature)
    for kind in STATE_KINDS:
        for rank in ranks:
            owned = kept_shards(rank, kind)
            by_shard_count = [
                [
                    *excess_problems(kind, owned, model, layout, rank.rank, count),
                    *_missing_problems(kind, owned, model, layout, rank.rank, count),
                ]
                for count in allowed_shard_counts(layout, kind)
            ]
            problems += [] if [] in by_shard_count else by_shard_count[0]
    return problems


def _missing_problems(
    kind: str, owned: Sequence[StateShard], model: ModelConfig, layout: Layout, rank: int, shards: int
) -> Iterator[str]:
    """Yield a line for states of which a rank holds fewer elements than its share.

    Shares that a library draws across parameters are not known, and are left out.
    """
    shares = rank_shares(model, layout, rank, shards)
    shapes, place = model_profile(model).parameter_shapes, layout.coordinates(rank)["tp"]
    if shards == 1:  # the last tensor-parallel ranks may have fewer rows of the vocabulary
        whole = {name: shard_numel(name, shapes[name], model, layout, 1, place=place) for name in shares}
        expected = sum(min(share, whole[name]) for name, share in shares.items())
    elif layout.data_parallel == "fsdp":
        index = shard_index(layout, rank)
        expected = sum(shard_numel(name, shapes[name], model, layout, shards, index, place) for name in shares)
    else:
        return
    numel = Counter({shard.state_name: 0 for shard in owned} or {"": 0})
    for shard in owned:
        numel[shard.state_name] += box_numel(shard.box)
    for state_name, elements in numel.items():
        if elements < expected:
            label = f"{kind} ({state_name})" if state_name else kind
            yield f"{label}: rank {rank} holds {elements} elements, and its share is {expected:.0f}"


def shard_index(layout: Layout, rank: int) -> int:
    """Return which of the data-parallel shards of a state a rank holds, from 0 on."""
    coordinates, index = layout.coordinates(rank), 0
    for axis in layout.sharding_axes:
        index = index * layout.axis_sizes[axis] + coordinates[axis]
    return index
