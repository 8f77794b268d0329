"""Sweeps in the order of their predictions: which runs are made, what is said of the others, and the regret."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.config.command import PlanConfig, merge_values
from harness.config.fingerprint import make_run_id, result_affecting_keys
from harness.config.from_dict import from_dict
from harness.hardware.machine import Machine
from harness.records.plan_validation import (
    PlannedConfiguration,
    PlanValidation,
    read_plan_validation,
)
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.report.findings import validation_sentences
from harness.report.view import View
from harness.runner.plan import make_plan
from harness.sweep.queued_run import QueuedRun, order_by_plan, queue_plan
from harness.util.text import UserError
from tests.support.commands import compose

H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (80 * 10**9,) * 8, 64, device_bytes=80 * 10**9)

STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "tp", "pp_1f1b", "tp_sp")


# A billion parameters on eight devices.
SETTINGS = (
    *("model=1b", "model.tie_word_embeddings=false", "precision=bf16_mixed"),
    *("world_size=8", "data=synthetic", "train.global_batch=32"),
)


def queued(strategy: str, checkpointing: str = "none", machine: Machine = H100, repeat: int = 0) -> QueuedRun:
    """Return a run with a strategy."""
    words = (f"strategy={strategy}", f"checkpointing={checkpointing}", f"repeat={repeat}")
    config, command = compose(*words, *SETTINGS)
    plan = make_plan(config, machine, command)
    return queue_plan(plan, repeat)


@pytest.fixture(scope="module")
def sweep() -> list[QueuedRun]:
    """Return twelve configurations, two of each strategy."""
    return [queued(name, kind) for name in STRATEGIES for kind in ("none", "full")]


def predicted_order(runs: list[QueuedRun]) -> list[str]:
    """Return the names of runs from the fastest on; all of them train on the same batch."""
    predictions = {run.name: run.plan.prediction for run in runs if run.plan is not None}
    seconds = {name: prediction.step_seconds for name, prediction in predictions.items() if prediction is not None}
    assert len(seconds) == len(runs)
    return sorted(seconds, key=seconds.__getitem__)


def test_the_best_five_predictions_are_measured_in_their_order(sweep: list[QueuedRun]) -> None:
    fastest = predicted_order(sweep)
    order = order_by_plan(sweep, PlanConfig(top=5))
    assert [run.name for run in order.runs] == fastest[:5]
    assert order.note.startswith(
        "plan.top=5: 7 of 12 configurations are not run: 7 predicted to be slower than the best 5"
    )
    everything = order_by_plan(sweep, PlanConfig(validate=True))
    assert [run.name for run in everything.runs] == fastest and not everything.note


def test_repeats_of_a_configuration_count_once(sweep: list[QueuedRun]) -> None:
    """A second repeat has a name of its own, and is made after the first ones of all configurations."""
    again = [queued(name, repeat=1) for name in STRATEGIES]
    order = order_by_plan([*sweep[::2], *again], PlanConfig(top=2))
    fastest = predicted_order(sweep[::2])[:2]
    assert [run.repeat_index for run in order.runs] == [0, 0, 1, 1]
    assert [run.name for run in order.runs[:2]] == fastest
    assert [run.config.strategy for run in order.runs[2:]] == [run.config.strategy for run in order.runs[:2]]


def test_what_does_not_fit_is_not_measured(sweep: list[QueuedRun]) -> None:
    """One billion parameters need more than 12 GB for each rank that has all of their state."""
    small = dataclasses.replace(H100, free_bytes=(12 * 10**9,) * 8)
    order = order_by_plan([queued(name, machine=small) for name in ("ddp", "tp")], PlanConfig(top=2))
    assert [run.config.strategy.name for run in order.runs] == ["tp"]
    assert order.note == "plan.top=2: 1 of 2 configurations are not run: 1 predicted not to fit"


def test_a_machine_without_a_description_has_to_be_calibrated() -> None:
    unknown = dataclasses.replace(H100, device_name="NVIDIA X1")
    with pytest.raises(UserError, match=r"plan.top=5 needs predictions, .*\(NVIDIA X1\): run harness calibrate first"):
        order_by_plan([queued("ddp", machine=unknown)], PlanConfig(top=5))
    run = dataclasses.replace(queued("ddp"), plan=None)
    with pytest.raises(UserError, match=r"plan.validate=true needs to know the machine"):
        order_by_plan([run], PlanConfig(validate=True))
    with pytest.raises(UserError, match=r"plan.top=0 is not a number of configurations"):
        from_dict(PlanConfig, {"top": 0}, "plan")


def test_plans_are_no_part_of_a_run_s_identity() -> None:
    pairs = [compose("strategy=ddp", *words) for words in ((), ("plan.top=5", "plan.validate=true"))]
    assert len({make_run_id(config, "cpu", 2, "x") for config, _ in pairs}) == 1
    assert "plan" not in result_affecting_keys(merge_values(*pairs[1]))


def record(run_id: str, speed: float, status: str = "ok") -> Record:
    """Return a record with a measured speed."""
    row: dict[str, Any] = {"run_id": run_id, "status": status, "tokens_per_second": speed}
    return Record.from_json({"row": row, "config": {}})


def test_regret_is_the_time_of_the_planned_best_over_the_best(sweep: list[QueuedRun], tmp_path: Path) -> None:
    """The planned best has 80 tokens a second and the measured best 100: its time is 25 % more, not 20 %."""
    order = order_by_plan(sweep, PlanConfig(top=3, validate=True))
    first, second, third = (run.name for run in order.runs)
    records = [record(first, 80.0), record(second, 100.0), record(third, 500.0, "error")]
    folder = ComparisonFolder(tmp_path)
    lines: list[str] = []
    order.validate(folder, records, lines.append)
    validation = read_plan_validation(folder)
    assert validation is not None
    assert validation.regret == pytest.approx(0.25)
    assert validation.measured_best is not None
    assert (validation.planned_best.run_id, validation.measured_best.run_id) == (first, second)
    sentence = validation.sentence()
    assert f"{first} was predicted to be the fastest and took 25.0% more time than {second}" in sentence
    assert "2 of 12 configurations measured" in sentence
    assert lines == [sentence]
    assert list(validation_sentences(View("x", [], folders={first: tmp_path / first}))) == [sentence]
    folder.plan_validation.write_text("[]")
    assert read_plan_validation(folder) is None


@pytest.mark.parametrize(
    ("speeds", "regret", "text"),
    [
        ((100.0, 90.0), 0.0, "a was predicted to be the fastest, and was (2 of 4 configurations measured)"),
        ((None, 90.0), None, "a was predicted to be the fastest and has no measured speed"),
        ((None, None), None, "nothing was measured"),
    ],
)
def test_a_validation_says_what_it_can(speeds: tuple[float | None, ...], regret: float | None, text: str) -> None:
    entries = tuple(PlannedConfiguration(name, 10.0 - i, speeds[i]) for i, name in enumerate("ab"))
    validation = PlanValidation(entries, 4)
    assert validation.regret == regret and text in validation.sentence()


def test_a_sweep_without_validation_writes_none(sweep: list[QueuedRun], tmp_path: Path) -> None:
    order = order_by_plan(sweep, PlanConfig(top=1))
    order.validate(ComparisonFolder(tmp_path), [record(order.runs[0].name, 1.0)], print)
    assert not list(tmp_path.iterdir())
