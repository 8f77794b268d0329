"""The wheel alone carries conf/ and sweeps/, runs without the clone, and lets a user add files."""

import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from tests.support.processes import ROOT, run_python

SMALL = ("train.steps=1", "train.warmup_steps=1", "train.seq_len=16", "proof.reference=false", "tracking=none")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "harness", "conf", "sweeps")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources that is removed before anything runs."""
    clone, target = tmp_path_factory.mktemp("clone") / "source", tmp_path_factory.mktemp("wheel")
    clone.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    done = run_python(target, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(clone))
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(clone)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into a folder; its dependencies are those of the running Python."""
    folder = tmp_path_factory.mktemp("installed")
    done = run_python(folder, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel))
    assert done.returncode == 0, done.stderr
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the installed command in a folder.

    If a clone of the package were used instead, the origin of its modules would show it.
    """
    done = run_python(folder, "-P", "-m", "harness", *arguments, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_runs_without_the_clone(installed: Path, tmp_path: Path) -> None:
    overview = run(installed, tmp_path, "--help").stdout
    assert "quickstart" in overview and "zero3" in overview
    located = run_python(tmp_path, "-P", "-c", "import harness; print(harness.__file__)", PYTHONPATH=str(installed))
    assert located.stdout.startswith(str(installed))
    run(installed, tmp_path, "strategy=ddp", "name=wheel", *SMALL)
    rows = pd.read_csv(tmp_path / "results" / "wheel" / "runs.csv")
    assert rows.status.tolist() == ["ok"] and rows.stale_reason.isna().all()
    again = run(installed, tmp_path, "strategy=ddp", "name=wheel", *SMALL)
    assert "is recorded; force=true runs it again" in again.stderr


@pytest.mark.long
def test_files_of_the_current_folder_come_first(installed: Path, tmp_path: Path) -> None:
    """The folder has a strategy, a model and a sweep of the user's own, and one file that replaces a packaged file."""
    for group, name, text in (
        ("conf/strategy", "mine", "name: mine\ndata_parallel: ddp\ndp_replicate: -1\n"),
        ("conf/checkpointing", "none", "name: none\n"),
        ("sweeps", "ours", "# @package _global_\nname: ours\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
         "      strategy: mine,tp\n"),
    ):  # fmt: skip
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / f"{name}.yaml").write_text(text)
    assert "mine" in run(installed, tmp_path, "ls", "strategies").stdout
    run(installed, tmp_path, "sweeps=ours", *SMALL)
    rows = pd.read_csv(tmp_path / "results" / "ours" / "runs.csv")
    assert set(zip(rows.strategy, rows.status, strict=True)) == {("mine", "ok"), ("tp", "ok")}


def test_another_projects_conf_does_not_replace_ours(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text("defaults:\n  - model: theirs\n")
    (tmp_path / "conf" / "model" / "tiny.yaml").write_text("layers: 3\n")
    done = run(installed, tmp_path, "strategy=ddp", "--cfg", "job")
    assert "hidden_size: 96" in done.stdout and "layers: 3" not in done.stdout


@pytest.mark.long
def test_the_wheel_in_an_empty_environment_runs_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    folder = tmp_path / "empty"
    folder.mkdir()

    def call(program: str, *arguments: str) -> Sequence[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(tmp_path / "env" / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    call("pip", "install", "-q", str(wheel))
    call("harness", "sweeps=quickstart", "tracking=none")
    rows = pd.read_csv(folder / "results" / "quickstart" / "runs.csv")
    assert rows.status.tolist() == ["ok"] * len(rows) and len(rows) == 27
