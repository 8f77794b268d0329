"""Random products of everything: each draw is proven or refused, never an error. More by the module's own command."""

from pathlib import Path

import pytest

from tests.random_runs import draw, ending

RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


@pytest.mark.parametrize("seed", range(15))
def test_a_random_run_is_proven_or_refused(results: Path, seed: int) -> None:
    overrides = draw(seed, RANKS)
    found = ending(overrides, results)
    assert found.status in ("ok", "refused"), (found.reason, " ".join(overrides))
