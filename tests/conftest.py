"""The fixtures that the tests of whole runs share: a results directory and the harness's command."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.commands import Done, Harness, run_harness

# The threads of two test processes and of their ranks would wait for each other's cores. A test process has one, and
# those of a rank sleep while they wait.
torch.set_num_threads(1)
os.environ["GOMP_SPINCOUNT"] = "0"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the one results directory in which the runs of all tests are recorded, and reused.

    All of pytest-xdist's test processes share it: the harness locks a run that is being made.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # its own folder lies in that of the whole session
        folder = folder.parent
    (folder / "results").mkdir(exist_ok=True)
    return folder / "results"


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    def call(*arguments: str) -> Done:
        return run_harness(tmp_path / "results", *arguments)

    return call
