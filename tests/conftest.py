"""What the tests of whole runs share: the harness as a user calls it, and as its parts."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import pandas as pd
import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from harness import compose, machine, records, run
from harness.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
Harness = Callable[..., subprocess.CompletedProcess[str]]


def run_harness(results: Path, *arguments: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
    """python -m harness with its results in a folder of the test's."""
    command = [sys.executable, "-m", "harness", *arguments, f"results_dir={results}", "tracking=none"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    def call(*arguments: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
        return run_harness(tmp_path / "results", *arguments, seconds=seconds)

    return call


def rows_of(results: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(results / name / "runs.csv", keep_default_na=False, na_values=[""])


def composed(*overrides: str) -> RunConfig:
    """The configuration that these overrides make on a command line."""
    compose.register()
    OmegaConf.register_new_resolver("harness.root", lambda: str(ROOT), replace=True)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        values = compose.plain(hydra.compose("config", [*overrides, "tracking=none"]))
    return compose.run_config(values)


def executed(config: RunConfig, entry: Callable[[str], None]) -> records.Record:
    """The record of one run by its parts, whose ranks run `entry`: harness.worker.main, or one of tests/sabotage.py."""
    planned = run.plan(config, machine.look(config.cluster))
    return run.execute(planned, [], lambda _: None, lambda _: None, entry)


def assert_not_proven(record: records.Record, found: str) -> None:
    """The run is an error, and one of the problems that the proof names has these words."""
    problems = record["proof"]["problems"]
    assert record["row"]["status"] == "error"
    assert any(found in problem for problem in problems), problems
