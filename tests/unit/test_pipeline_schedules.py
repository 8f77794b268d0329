"""Bubbles and passes in flight: the formulas compared with torch's own schedules, simulated with unit times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cost_model.pipeline import bubble_ratio, max_in_flight_micro_batches
from harness.layout.layout import Layout
from harness.layout.partition import balanced_layers
from tests.support.schedules import Order, laid_out, order

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # forward, whole backward, or its halves for inputs and weights


def played(orders: Order, layout: Layout) -> float:
    """Return when the last rank ends if each operation starts once its inputs are there."""
    ended: dict[tuple[int, str, int], float] = {}
    clock, turn = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    while any(turn[place] < len(actions) for place, actions in orders.items()):
        before = dict(turn)
        for place, actions in orders.items():
            while turn[place] < len(actions):
                stage, operation, index = actions[turn[place]]
                needs = {(stage, "I", index)} if operation == "W" else {(stage, "F", index)}
                if operation == "F":
                    needs = {(stage - 1, "F", index)} if stage else set()
                elif operation in "BI" and stage < layout.num_stages - 1:
                    needs |= {(stage + 1, operation, index)}
                if not needs <= ended.keys():
                    break
                start = max([clock[place], *(ended[need] for need in needs)])
                clock[place] = ended[stage, operation, index] = start + SECONDS[operation] / layout.virtual_stages
                turn[place] += 1
        assert turn != before, "the schedule waits for itself"
    return max(clock.values())


def most_in_flight(actions: list[tuple[int, str, int]]) -> int:
    now = most = 0
    for _, operation, _ in actions:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[operation]
        most = max(most, now)
    return most


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
def test_the_formulas_are_what_the_schedules_do(schedule: str, v: int, p: int, rounds: int) -> None:
    layout, micro_batches = laid_out(schedule, p, v), p * rounds
    orders = order(layout, micro_batches)
    working = 3 * micro_batches
    assert (played(orders, layout) - working) / working == pytest.approx(bubble_ratio(layout, micro_batches))
    assert [most_in_flight(orders[place]) for place in range(p)] == [
        max_in_flight_micro_batches(layout, micro_batches, place) for place in range(p)
    ]


@given(st.integers(1, 12), st.integers(0, 11), st.floats(0, 8), st.floats(0, 8))
def test_layers_are_spread_as_evenly_as_can_be(count: int, more: int, first: float, last: float) -> None:
    depth = count + more

    def fullest(split: tuple[int, ...]) -> float:
        sizes = [float(number) for number in split]
        sizes[0] += first
        sizes[-1] += last
        return max(sizes)

    found = balanced_layers(depth, first, last, count)
    assert len(found) == count and sum(found) == depth and min(found) >= 1
    for giver in range(count):  # no layer moved from one stage to another makes the fullest less full
        for taker in range(count):
            moved = list(found)
            moved[giver] -= 1
            moved[taker] += 1
            if min(moved) >= 1:
                assert fullest(tuple(moved)) >= fullest(found) - 1e-9
