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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and with the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("distributions")
    build(ROOT, folder)
    return folder


def build(sources: Path, folder: Path) -> None:
    done = run_python(folder, "-m", "build", "--no-isolation", "--outdir", str(folder), str(sources))
    assert done.returncode == 0, done.stdout + done.stderr


def check(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Check the distributions in a folder as the workflow of a release does."""
    return run_python(folder, "-m", "twine", "check", "--strict", *map(str, folder.iterdir()))


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
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


def test_an_index_takes_both_distributions(distributions: Path, tmp_path: Path) -> None:
    """The planted fault is a project without a description."""
    (source,) = distributions.glob("*.tar.gz")
    done = check(distributions)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout
    shutil.unpack_archive(source, tmp_path)
    (project,) = tmp_path.glob("*/pyproject.toml")
    project.write_text(project.read_text().replace('readme = "README.md"\n', ""))
    (tmp_path / "bare").mkdir()
    build(project.parent, tmp_path / "bare")
    done = check(tmp_path / "bare")
    assert done.returncode == 1 and "long_description" in done.stdout, done.stdout


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
def test_the_wheel_in_an_empty_environment_runs_all_but_deepspeed(wheel: Path, tmp_path: Path) -> None:
    """Only what the extra brings is refused without it."""
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
    call("harness", "-m", "strategy=ddp,tp,zero2", "name=wheel", *SMALL)
    rows = pd.read_csv(folder / "results" / "wheel" / "runs.csv")
    assert dict(zip(rows.strategy, rows.status, strict=True)) == {"ddp": "ok", "tp": "ok", "zero2": "refused"}
