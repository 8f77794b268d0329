"""The fixtures that the tests of whole runs share: a results directory and the harness's command."""

from pathlib import Path

import pytest

from tests.support.commands import Done, Harness, run_harness


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the one results directory in which the runs of all tests are recorded, and reused."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    def call(*arguments: str) -> Done:
        return run_harness(tmp_path / "results", *arguments)

    return call
