"""Predicted peaks beside those that the runs of results/random_runs.csv had."""

import csv
import shlex
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

import pytest

from harness.api import compose_run_config
from harness.cost_model.memory import estimate_memory
from harness.engines.base import load_engine
from harness.layout.layout import resolve_layout

ROOT = Path(__file__).resolve().parents[2]

WITH_BUCKETS = ("zero1_defaults", "zero1_tuned", "zero2_defaults", "zero2_tuned", "zero3_defaults")


def recorded_runs() -> list[dict[str, str]]:
    """Return the rows of runs that were trained, proven and predicted; no compiled run is predicted."""
    with (ROOT / "results" / "random_runs.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["status"] == "ok" and row["predicted_peak_bytes"]]


def prediction_error(row: dict[str, str]) -> float:
    """Return the predicted peak divided by the measured one, minus 1."""
    config, device = compose_run_config(*shlex.split(row["overrides"]))
    layout = resolve_layout(config.strategy, int(row["world_size"]))
    widths = load_engine(layout.engine).state_widths(config, layout)
    return estimate_memory(config, layout, widths, device).peak_bytes / int(row["peak_allocated_bytes"]) - 1


def test_copies_of_gradients_are_planned() -> None:
    """DDP's 16-bit buckets are reduced in fp32 copies, and stage 3 copies all gradients for its optimizer.

    Stage 2 keeps whole gradients of the parameters in a rank's partition; stage 3 and gloo copy what they reduce.
    """
    # Draw 1013 (stage 3 on one rank, the loss in two parts) is planned 5.8 % too high.
    draws = ["1008", "1057", "1104", "1111", "2017", "2069", "2076", "2090"]
    draws += ["1046", "1050", "1061", "1071", "1094", "2094", "2127", "1093"]
    errors = {row["draw"]: prediction_error(row) for row in recorded_runs() if row["draw"] in draws}
    assert len(errors) == len(draws)
    assert {draw: error for draw, error in errors.items() if abs(error) > 0.0025} == {}


def test_buckets_that_ddp_allocates_anew_are_planned() -> None:
    """With one warm-up step and accumulation, DDP's new buckets lie beside gradients in the first timed step.

    Without accumulation (5013, 5118) no gradients exist then.
    """
    draws = ("1048", "4051", "4067", "4087", "4144", "5013", "5118")
    errors = {row["draw"]: prediction_error(row) for row in recorded_runs() if row["draw"] in draws}
    assert set(errors) == set(draws)
    assert {draw: error for draw, error in errors.items() if abs(error) > 0.0005} == {}


def test_buckets_of_deepspeed_are_planned_as_they_are() -> None:
    """A bucket has 2e8 to 2e9 bytes, far more than these models; BF16_Optimizer has none, stage 2 has 16-bit ones."""
    errors = {row["draw"]: prediction_error(row) for row in recorded_runs() if row["strategy"] in WITH_BUCKETS}
    assert len(errors) >= 19
    assert {draw: error for draw, error in errors.items() if abs(error) > 0.05} == {}


@pytest.mark.long
def test_most_peaks_are_planned_within_a_percent(capsys: pytest.CaptureFixture[str]) -> None:
    """Gloo's copies and threads are why a few are not; those of a GPU have no such buffers."""
    errors = defaultdict(list)
    for row in recorded_runs():
        errors[row["strategy"]].append(abs(prediction_error(row)))
    with capsys.disabled():
        for strategy, values in sorted(errors.items()):
            print(f"\n{strategy:20} {len(values):3} runs, median {median(values):.4f}, most {max(values):.4f}", end="")
    everything = [value for values in errors.values() for value in values]
    assert median(everything) <= 0.002
    assert quantiles(everything, n=20)[-1] <= 0.12
    assert max(everything) <= 0.25
