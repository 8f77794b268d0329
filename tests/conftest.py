"""What the tests of whole runs share: the harness as a user calls it, and as its parts."""

from pathlib import Path

import pytest

from tests.support.commands import Done, Harness, run_harness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    def call(*arguments: str) -> Done:
        return run_harness(tmp_path / "results", *arguments)

    return call
