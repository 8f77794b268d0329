"""The benchmark of the harness's own cost is whole, and both its sides train the same."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from tests.benchmarks.overhead import agree, summarised


def test_one_pair(tmp_path: Path) -> None:
    """The real command, with a cold and a warm pair. How the two sides compare is not asserted: machines are noisy."""
    out = tmp_path / "folder" / "overhead.json"
    command = [sys.executable, "-m", "tests.benchmarks.overhead", "--pairs", "1", "--steps", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["environment"]["cores"] >= 1
    assert report["machine"]["versions"]["torch"] and report["machine"]["ranks"]["OMP_NUM_THREADS"]
    (comparison,) = report["comparisons"]
    assert comparison["steps"] == 2 and [pair["cold"] for pair in comparison["pairs"]] == [True, False]
    for pair in comparison["pairs"]:
        bare, harness = pair["bare"], pair["harness"]
        for side in (bare, harness):
            assert len(side["losses"]) == 5 and len(side["seconds"]) == 2  # three steps of warm-up
            assert side["step_seconds"] == pytest.approx(statistics.median(side["seconds"]))
            assert sum(side["seconds"]) < side["wall_seconds"]
        assert harness["losses"] == pytest.approx(bare["losses"], rel=1e-5)
        assert bare["losses"][-1] < bare["losses"][0] < 6  # it does train: ln 256 is 5.5
        for key in ("step_seconds", "wall_seconds"):
            assert pair["ratios"][key] == pytest.approx(harness[key] / bare[key])
            if not pair["cold"]:
                assert comparison["ratios"][key] == {"median": pair["ratios"][key], "interval": None}
    assert done.stdout.startswith("2 steps, 1 warm pairs, harness over script: a step ")


@pytest.mark.parametrize("found", [[5.5, 5.0001], [5.5, float("nan")], [5.5]])
def test_another_training_is_no_benchmark(found: list[float]) -> None:
    with pytest.raises((SystemExit, ValueError)):
        agree([5.5, 5.0], found)


def test_interval_holds_the_median() -> None:
    ratios = [1.0, 1.02, 0.98, 1.01, 1.4]
    summary = summarised(ratios)
    low, high = summary["interval"]
    assert summary["median"] == 1.01 and 0.98 <= low < 1.01 < high <= 1.4
    assert summarised(ratios) == summary  # one seed
