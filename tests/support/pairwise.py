"""The parametrization of a test by a product of values, of which the ordinary tests run a pairwise cover."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest


def pairwise(**axes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Return a parametrization by every combination of the axes' named values.

    The ordinary cases contain every pair of values of two axes at least once, since most faults need no more than two
    values to show; all other cases are marked `long`.
    """
    combinations = [dict(zip(axes, names, strict=True)) for names in itertools.product(*axes.values())]
    uncovered = {pair for names in combinations for pair in _pairs(names)}
    ordinary = []
    while uncovered:  # greedy: the combination with the most uncovered pairs is next, the first of equals
        best = max(combinations, key=lambda names: len(uncovered & _pairs(names)))
        uncovered -= _pairs(best)
        ordinary.append(best)
    cases = [
        pytest.param(
            *(axes[axis][name] for axis, name in names.items()),
            id="-".join(names.values()),
            marks=() if names in ordinary else pytest.mark.long,
        )
        for names in combinations
    ]
    return pytest.mark.parametrize(list(axes), cases)


def _pairs(names: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(names.items(), min(2, len(names))))
