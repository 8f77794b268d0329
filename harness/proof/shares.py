"""The proof that single ranks of a layout hold their shares, where the other ranks are not known."""

from collections.abc import Iterator, Sequence
from functools import partial

from harness.config.model import ModelConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import is_expert_weight
from harness.layout.state_widths import STATE_KINDS
from harness.proof.layout import (
    elements_by_state,
    excess_problems,
    kept_shards,
    problems_of_state,
    rank_shares,
    shard_numel,
)
from harness.records.rank_report import RankReport, StateShard


def share_problems(model: ModelConfig, layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where some of a layout's ranks hold other shards than their shares; the other ranks are not known.

    A rank must hold every element of its shares where they follow from the layout alone, and nothing more.
    """
    for kind in STATE_KINDS:
        for rank in ranks:
            problems_of = partial(_share_problems, kind, kept_shards(rank, kind), model, layout, rank.rank)
            yield from problems_of_state(kind, layout, problems_of)


def _share_problems(
    kind: str, owned: Sequence[StateShard], model: ModelConfig, layout: Layout, rank: int, shards: int
) -> Iterator[str]:
    """Yield a line for parameters of other stages, and for states of which a rank holds more or less than its share.

    Shares that a library draws across parameters are not known: of these a rank may hold less.
    """
    yield from excess_problems(kind, owned, model, layout, rank, shards)
    shares = rank_shares(model, layout, rank, shards)
    shapes, place = model_profile(model).parameter_shapes, layout.coordinates(rank)["tp"]
    if shards == 1:  # the last tensor-parallel ranks may have fewer rows of the vocabulary
        whole = {name: shard_numel(name, shapes[name], model, layout, 1, place=place) for name in shares}
        expected = sum(min(share, whole[name]) for name, share in shares.items())
    elif layout.data_parallel == "fsdp":
        index = {False: layout.shard_index(rank), True: layout.expert_shard_index(rank)}  # by whether it is an expert's
        expected = sum(
            shard_numel(name, shapes[name], model, layout, shards, index[is_expert_weight(name)], place)
            for name in shares
        )
    else:
        return
    numel: dict[str, int] = elements_by_state(kind, owned) or {kind: 0}
    for label, elements in numel.items():
        if elements < expected:
            yield f"{label}: rank {rank} holds {elements} elements, and its share is {expected:.0f}"
