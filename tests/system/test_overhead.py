"""The benchmark of the harness's own cost is complete, and both its sides train the same."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.overhead import TURN_SECONDS, check_same_losses, summarize
from tests.support.commands import ROOT


@pytest.mark.long
def test_one_pair_of_each_kind_is_measured_and_written(tmp_path: Path) -> None:
    """The real command runs one pair of each kind.

    How the two sides compare is not asserted, because machines are noisy.
    """
    out = tmp_path / "folder" / "overhead.json"
    options = ["--pairs", "1", "--steps", "2", "--steps-in-turns", "30", "--out", str(out)]
    command = [sys.executable, "-m", "tests.benchmarks.overhead", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["environment"]["cores"] >= 1
    assert report["machine"]["versions"]["torch"] and report["machine"]["ranks"]["OMP_NUM_THREADS"]
    (whole,), turns = report["whole_runs"], report["steps_in_turns"]
    assert [pair["cold"] for pair in whole["pairs"]] == [True, False]
    assert [pair["cold"] for pair in turns["pairs"]] == [False]
    for comparison, key, steps in ((whole, "wall_seconds", 2), (turns, "step_seconds", 30)):
        assert comparison["steps"] == steps
        for pair in comparison["pairs"]:
            bare, harness = pair["bare"], pair["harness"]
            for side in (bare, harness):
                assert len(side["losses"]) == steps + 3 and len(side["seconds"]) == steps  # three steps of warm-up
                assert side["step_seconds"] == pytest.approx(statistics.median(side["seconds"]))
                assert sum(side["seconds"]) < side["wall_seconds"]
            assert harness["losses"] == pytest.approx(bare["losses"], rel=1e-5)
            assert bare["losses"][-1] < bare["losses"][0] < 6  # it does train: ln 256 is 5.5
            assert pair["ratio"] == pytest.approx(harness[key] / bare[key])
        assert comparison["ratio"] == {"median": comparison["pairs"][-1]["ratio"], "interval": None}
    for side in ("bare", "harness"):  # both were stopped, again and again, and for as long as the other ran
        waits = [seconds for seconds in turns["pairs"][0][side]["seconds"] if seconds > TURN_SECONDS]
        assert len(waits) >= 2
    assert done.stdout.startswith("a whole run, 2 steps, 1 pairs, harness over script: ")


@pytest.mark.parametrize("losses", [[5.5, 5.0001], [5.5, float("nan")], [5.5]])
def test_losses_that_differ_fail_the_benchmark(losses: list[float]) -> None:
    with pytest.raises((SystemExit, ValueError)):
        check_same_losses([5.5, 5.0], losses)


def test_the_interval_contains_the_median() -> None:
    ratios = [1.0, 1.02, 0.98, 1.01, 1.01, 1.4]
    summary = summarize(ratios)
    low, high = summary["interval"]
    assert summary["median"] == 1.01 and 0.98 <= low < 1.01 < high <= 1.4
    assert summarize(ratios) == summary  # one seed
