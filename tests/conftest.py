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

from harness import compose
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
