"""A real calibration of this machine, a plan with its file, and a run that is predicted by it."""

import json
from pathlib import Path

import pytest
import yaml

from harness.config.from_dict import from_dict
from harness.config.schema import ClusterConfig
from tests.support.commands import read_rows
from tests.support.processes import run_python

LAYOUT = ("strategy=ddp", "world_size=2", "model=tiny", "data=synthetic", "precision=fp32")


@pytest.mark.long
def test_a_calibrated_machine_is_planned_for_and_its_runs_are_predicted(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-m", "harness", "calibrate", "--quick", "--device", "cpu", "--name", "box")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "conf" / "cluster" / "box.yaml"
    for text in ("matrix products, float32", "all_gather of 2 ranks", "One machine cannot measure", "cluster=box"):
        assert text in done.stdout
    cluster: ClusterConfig = from_dict(ClusterConfig, yaml.safe_load(path.read_text()))
    hardware = cluster.hardware
    assert hardware.calibrated and not hardware.datasheet_only
    assert 1e9 < hardware.peak_flops < 1e14
    assert 1e8 < hardware.memory_bandwidth < 1e13
    assert 1e-7 < hardware.fitted.launch_seconds < 1e-2

    again = run_python(tmp_path, "-m", "harness", "calibrate", "--name", "box")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.count("\n") == 1 and "box.yaml exists already" in again.stderr

    planned = run_python(tmp_path, "-m", "harness", "plan", "cluster=box", *LAYOUT, "format=json")
    assert planned.returncode == 0, planned.stderr
    (plan,) = json.loads(planned.stdout)
    run = run_python(tmp_path, "-m", "harness", *LAYOUT, "tracking=none", "proof.reference=false")
    assert run.returncode == 0, run.stderr
    (row,) = read_rows(tmp_path / "results", "runs").itertuples()
    assert row.predicted_step_seconds == plan["predicted_step_seconds"] > 0 and row.step_seconds > 0
