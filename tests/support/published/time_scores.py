"""How far predicted step times are from published ones: errors, order within groups, and regret of the choice."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import mean, median

from tests.support.published import PublishedRow

CLEARLY_APART = 1.03  # the ratio of two measured step times from which on their order counts

DOMINATED = 0.1  # MFU below which nanotron's own transfers take most of a step, and times are not scored

ERROR, MEAN_ERROR = "median error of the step time", "mean error of the step time"
ORDER, REGRET = "pairs in the right order", "slowdown of the chosen layout"


def is_scored(row: PublishedRow) -> bool:
    """Return whether a row's step time is scored; its order always is."""
    return row.measured.get("mfu", 1.0) >= DOMINATED


def choices(rows: Sequence[PublishedRow]) -> dict[tuple[str, int, int], list[int]]:
    """Return the positions of rows by what they do: layouts compete that train a group's model on the same batch."""
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.group, row.config.train.global_batch, row.config.train.seq_len].append(index)
    return groups


def time_scores(rows: Sequence[PublishedRow], predicted: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield the errors of step times, the share of pairs in the right order, and the regret of the choice.

    Groups without two layouts for the same batch have neither order nor regret.
    """
    measured = [row.measured["step_seconds"] for row in rows]
    errors = [abs(p / m - 1) for row, p, m in zip(rows, predicted, measured, strict=True) if is_scored(row)]
    yield ERROR, median(errors)
    yield MEAN_ERROR, mean(errors)
    groups = [group for group in choices(rows).values() if len(group) > 1]
    apart = [
        0.5
        if predicted[first] == predicted[second]
        else float((predicted[first] < predicted[second]) == (measured[first] < measured[second]))
        for group in groups
        for first, second in combinations(group, 2)
        if max(measured[first], measured[second]) > CLEARLY_APART * min(measured[first], measured[second])
    ]
    if apart:
        yield ORDER, mean(apart)
    if groups:
        yield REGRET, mean(regret(group, predicted, measured) for group in groups)


def regret(group: Sequence[int], predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much slower than the best of a group its layout is that is predicted to be the fastest.

    Of several that are predicted to be equally fast any may be chosen.
    """
    lowest = min(predicted[index] for index in group)
    chosen = mean(measured[index] for index in group if predicted[index] == lowest)
    return chosen / min(measured[index] for index in group) - 1
