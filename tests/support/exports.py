"""Exports of runs, trained or not, and of the recommended layouts, and commands in their folders."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

from harness.cli.main import main
from harness.runner import resolve
from harness.runner.launch_run import build_run_spec, write_row
from harness.runner.plan import make_plan
from tests.support.commands import ROOT, SMALL_BATCH, compose, run_folder, run_with
from tests.support.published_plans import read_rows

RECOMMENDED = read_rows()  # of docs/which-layout.md


def settings_of(row: dict[str, str]) -> list[str]:
    """Return the settings of a plan of a recommended layout."""
    return [*row["search"].removeprefix("harness plan ").split(), *row["overrides"].split(), "data=synthetic"]


def recorded(results: Path, overrides: str) -> Path:
    """Return the folder of a run."""
    record = run_with(results, *overrides.split())
    assert (record.status, record.row["reason"]) == ("ok", "")
    return run_folder(results, record).path


def exported(results: Path, overrides: str) -> Path:
    """Return the folder of a run that was exported."""
    directory = recorded(results, overrides)
    assert main(["export", str(directory)]) == 0
    return directory


def output(folder: Path, launch: tuple[str, ...]) -> str:
    """Return what a command prints in the folder of an export; it builds no operator of DeepSpeed."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    built = folder / "built"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(built)}
    done = subprocess.run(
        launch,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
    assert not built.exists()
    return done.stdout


def of_the_run(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "steps.jsonl").read_text().splitlines()]


def written(results: Path, overrides: str, *others: str, status: int = 0) -> Path:
    """Export a run whose files were left without training it, which ends with this exit status."""
    folder = (f"results_dir={results}", "name=untrained", "proof.reference=false", "world_size=2", *SMALL_BATCH)
    config, command_config = compose(*folder, *overrides.split(), *others)
    planned = make_plan(config, resolve.detect_machine(config.cluster), command_config)
    planned.folder.path.mkdir(parents=True, exist_ok=True)
    spec, _ = build_run_spec(planned)
    spec.write(planned.folder.path)
    write_row(planned, {"status": "ok", "reason": ""})
    assert main(["export", str(planned.folder.path)]) == status
    return planned.folder.path / "export"
