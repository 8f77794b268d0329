"""Which of several choices no other beats in both cost and gain."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each (cost, gain) whether no other costs no more and gains no less, one of them strictly."""
    least_cost: dict[float, float] = {}  # by gain
    for cost, gain in points:
        least_cost[gain] = min(cost, least_cost.get(gain, cost))
    kept: dict[float, float] = {}
    below = float("inf")  # the least cost of a larger gain
    for gain in sorted(least_cost, reverse=True):
        if least_cost[gain] < below:
            kept[gain] = below = least_cost[gain]
    return [kept.get(gain) == cost for cost, gain in points]
