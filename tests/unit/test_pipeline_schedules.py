"""Bubbles and passes in flight: the formulas compared with torch's own schedules, simulated with unit times."""

import itertools
from collections.abc import Sequence
from functools import cache
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cost_model.pipeline import bubble_ratio, max_in_flight_micro_batches
from harness.layout.layout import Layout
from harness.layout.partition import balanced_layers
from tests.support.schedules import Order, laid_out, order

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # forward, whole backward, or its halves for inputs and weights


def simulated_seconds(orders: Order, layout: Layout) -> float:
    """Return when the last rank ends if each operation starts once its inputs are there."""
    places = {action: (rank, index) for rank, actions in orders.items() for index, action in enumerate(actions)}

    @cache
    def end(rank: int, place: int) -> float:
        """Return when a rank has done so many operations."""
        stage, operation, index = orders[rank][place]
        needs = [(stage, "I", index)] if operation == "W" else [(stage, "F", index)]
        if operation == "F":
            needs = [(stage - 1, "F", index)] if stage else []
        elif operation in "BI" and stage < layout.num_stages - 1:
            needs.append((stage + 1, operation, index))
        waited = [end(rank, place - 1) if place else 0.0, *(end(*places[need]) for need in needs)]
        return max(waited) + SECONDS[operation] / layout.virtual_stages

    return max(end(*place) for place in sorted(places.values(), key=itemgetter(1)))


def max_in_flight(actions: list[tuple[int, str, int]]) -> int:
    """Return the most micro-batches whose backward has not ended."""
    return max(itertools.accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[operation] for _, operation, _ in actions))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(
    ("schedule", "v"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
    ],
)
def test_formulas_agree_with_torchs_schedules(schedule: str, v: int, p: int, rounds: int) -> None:
    layout, micro_batches = laid_out(schedule, p, v), p * rounds
    orders = order(layout, micro_batches)
    working = 3 * micro_batches
    assert (simulated_seconds(orders, layout) - working) / working == pytest.approx(bubble_ratio(layout, micro_batches))
    assert [max_in_flight(orders[pp_rank]) for pp_rank in range(p)] == [
        max_in_flight_micro_batches(layout, micro_batches, pp_rank) for pp_rank in range(p)
    ]


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(0, 6), st.floats(0, 8), st.floats(0, 8))
def test_no_other_split_of_layers_has_a_smaller_largest_stage(count: int, more: int, first: float, last: float) -> None:
    depth = count + more

    def fullest(split: Sequence[int]) -> float:
        """Return the size of the largest stage."""
        return max(map(sum, zip(split, [first, *[0.0] * (count - 2), last], strict=True))) if count > 1 else 0.0

    layers = balanced_layers(depth, first, last, count)
    assert len(layers) == count and sum(layers) == depth and min(layers) >= 1
    cuts = itertools.combinations(range(1, depth), count - 1)
    splits = ([end - start for start, end in itertools.pairwise((0, *inner, depth))] for inner in cuts)
    assert fullest(layers) <= min(map(fullest, splits)) + 1e-9
