"""A sweep that measures the best of its predictions on a described machine, and says whether the winner won."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from harness.calibration.cluster import write_cluster
from harness.config.hardware import FittedHardware, HardwareConfig
from harness.hardware.machine import processor_name, usable_cores
from tests.support.commands import read_rows
from tests.support.processes import run_python

SWEEP = ("-m", "strategy=ddp,tp,fsdp_full_shard,pp_1f1b", "world_size=2", "model=tiny", "data=synthetic")
QUICK = ("train.steps=2", "train.warmup_steps=1", "tracking=none", "proof.reference=false", "name=planned")


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """Return a folder whose conf/cluster describes this machine, with round figures that nothing measured."""
    fitted = FittedHardware(0.8, 0.3, 1.0, 0.9, 2e-6, 5e-6, 0.8, 3e-4, 0.8, 3e-4, 0.0, 0.5)
    hardware = HardwareConfig(
        *("cpu", 2**34, 4e10, 2e9, 1e9, ("round figures",), fitted, "nothing"),
        processor=processor_name(),
        cores=len(usable_cores()),
        peak_flops=2e11,
        calibrated=True,
    )
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    write_cluster(folder / "box.yaml", "box", 2, hardware)
    return tmp_path


def rows(folder: Path) -> pd.DataFrame:
    """Return the rows of the sweep in the order in which they were measured."""
    return read_rows(folder / "results", "planned").sort_values("started_at", ignore_index=True)


@pytest.mark.long
def test_a_sweep_measures_the_best_predictions_and_says_whether_the_winner_won(described: Path) -> None:
    done = run_python(described, "-m", "harness", *SWEEP, *QUICK, "plan.top=2")
    assert done.returncode == 0, done.stderr
    measured = rows(described)
    assert len(measured) == 2 and measured.predicted_step_seconds.is_monotonic_increasing
    assert "plan.top=2: 2 of 4 configurations are not run: 2 predicted to be slower than the best 2" in done.stderr

    again = run_python(described, "-m", "harness", *SWEEP, *QUICK, "plan.top=3", "plan.validate=true")
    assert again.returncode == 0, again.stderr
    validated = rows(described)
    assert [*validated.run_id[:2]] == [*measured.run_id]
    assert len(validated) == 3 and validated.predicted_step_seconds[2] >= measured.predicted_step_seconds[1]
    found = json.loads((described / "results" / "planned" / "plan_validation.json").read_text())
    assert found["planned_best"] == measured.run_id[0]
    assert found["regret"] == pytest.approx(validated.tokens_per_second.max() / validated.tokens_per_second[0] - 1)
    report = (described / "results" / "planned" / "report.md").read_text()
    assert re.search(r"predicted to be the fastest.*3 of 4 configurations measured", report)


def test_a_sweep_on_a_machine_that_no_file_describes_says_what_to_do(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-m", "harness", *SWEEP, *QUICK, "plan.top=2")
    assert done.returncode == 2
    assert done.stderr.rstrip().splitlines()[-1].endswith("of this machine (cpu): type harness calibrate first")
    assert not list((tmp_path / "results").glob("planned/*/record.json"))
