"""Random products of all options, each of which is proven or refused, but never an error.

More of them are drawn by python -m tests.support.random_runs.
"""

from pathlib import Path

import pytest

from tests.support.random_draws import draw, listed
from tests.support.random_runs import EXPECTED, Ending, ending, outcome

RANKS, FIRST, DRAWS = 4, 16, 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


@pytest.fixture(scope="module")
def endings() -> dict[int, Ending]:
    return {}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DRAWS))
def test_a_random_run_is_proven_or_refused(results: Path, endings: dict[int, Ending], seed: int) -> None:
    overrides = listed(draw(seed, RANKS))
    end = endings[seed] = ending(overrides, results)
    assert outcome(end, overrides) in EXPECTED, (end, " ".join(overrides))


def test_most_random_runs_are_run(endings: dict[int, Ending]) -> None:
    """Most draws run, because refusing everything would prove nothing."""
    ran = sum(end.status == "ok" for end in endings.values())
    assert ran >= len(endings) / 2
