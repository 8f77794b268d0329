"""The proof that single ranks of a layout hold their shares, where the other ranks are not known."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import is_expert_weight
from harness.layout.state_widths import STATE_KINDS, StateKind
from harness.proof.layout import (
    elements_by_state,
    excess_problems,
    is_kept,
    kept_shards,
    problems_of_state,
    rank_shares,
    shard_numel,
)
from harness.records.rank_report import RankReport, StateShard


def share_problems(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where some of a layout's ranks hold other shards than their shares; the other ranks are not known.

    A rank must hold every element of its shares where they follow from the layout alone, and nothing more.
    """
    for kind in STATE_KINDS:
        for rank in ranks:
            problems_of = partial(_share_problems, kind, kept_shards(rank, kind), config, layout, rank.rank)
            yield from problems_of_state(kind, layout, problems_of)


def _share_problems(
    kind: StateKind, owned: Sequence[StateShard], config: RunConfig, layout: Layout, rank: int, shards: int
) -> Iterator[str]:
    """Yield a line for parameters of other stages, and for states of which a rank holds more or less than its share.

    Shares that a library draws across parameters are not known: of these a rank may hold less.
    """
    model = config.model
    yield from excess_problems(kind, owned, model, layout, rank, shards)
    shares = rank_shares(model, layout, rank, shards, kind)
    shapes, place = model_profile(model).parameter_shapes, layout.coordinates(rank)["tp"]
    if shards == 1:  # the last tensor-parallel ranks may have fewer rows of the vocabulary
        for name, share in shares.items():
            shares[name] = min(share, shard_numel(name, shapes[name], model, layout, 1, place=place))
    elif layout.data_parallel == "fsdp":
        index = {False: layout.shard_index(rank), True: layout.expert_shard_index(rank)}  # by whether it is an expert's
        for name in shares:
            place_of = index[is_expert_weight(name)]
            shares[name] = shard_numel(name, shapes[name], model, layout, shards, place_of, place)
    else:
        return
    by_state: defaultdict[str, list[StateShard]] = defaultdict(list, {} if owned else {"": []})
    for shard in owned:
        by_state[shard.state_name].append(shard)
    for state, own in by_state.items():
        expected = sum(share for name, share in shares.items() if is_kept(config, name, state))
        for label, elements in (elements_by_state(kind, own) or {kind: 0}).items():
            if elements < expected:
                yield f"{label}: rank {rank} holds {elements} elements, and its share is {expected:.0f}"
