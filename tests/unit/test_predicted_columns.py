"""The step time that a run's row predicts, and sweeps in the order of these predictions with their regret."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.calibration.cluster import write_cluster
from harness.config.command import PlanConfig
from harness.config.from_dict import from_dict
from harness.config.stack import load_stack
from harness.cost_model import prediction
from harness.hardware.machine import (
    Machine,
    described_cluster,
    described_devices,
    hardware_in_files,
    machine_hardware,
    processor_name,
)
from harness.planner.space import predict
from harness.records.plan_validation import PlannedConfiguration, PlanValidation, read_plan_validation
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.report.findings import validation_sentences
from harness.report.view import View
from harness.runner import plan as run_plan
from harness.runner.plan import RunPlan, capacity_problem, make_plan
from harness.runner.record import predicted_columns, predicted_step_entry
from harness.runner.resolve import machine_of_run
from harness.runner.run import needs_at_least
from harness.sweep.queued_run import QueuedRun, order_by_plan, queue_plan
from harness.util.text import UserError
from tests.support.commands import compose

H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (80 * 10**9,) * 8, 64, device_bytes=80 * 10**9)

DATASHEET = described_devices()[H100.device_name]


def plan_on(machine: Machine, *overrides: str) -> RunPlan:
    """Return the plan of ddp on two ranks."""
    config, command = compose("strategy=ddp", "world_size=2", "model=tiny", "data=synthetic", *overrides)
    return make_plan(config, machine, command)


def step_seconds(plan: RunPlan) -> float:
    """Return the predicted step time of a plan that has one."""
    return float(predicted_columns(plan)["predicted_step_seconds"])


def test_a_described_device_has_a_predicted_step_time() -> None:
    """All files describe different devices, and a device without a file has no prediction of time, only of memory."""
    assert DATASHEET.memory_bytes > 79 * 2**30
    plan = plan_on(H100)
    assert 0 < step_seconds(plan) < 1 and step_seconds(plan_on(H100, "train.seq_len=64")) != step_seconds(plan)
    unknown = predicted_columns(plan_on(dataclasses.replace(H100, device_name="NVIDIA X1")))
    assert unknown["predicted_step_seconds"] is None and unknown["predicted_peak_bytes"] is not None
    compiled = dataclasses.replace(plan.config, train=dataclasses.replace(plan.config.train, compile=True))
    assert predicted_columns(dataclasses.replace(plan, config=compiled)) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=ddp",),
        ("strategy=zero_offload",),
        ("strategy=zero3", "strategy.offload=parameters"),
        ("strategy=fsdp_full_shard", "checkpointing.offload_activations=true", "train.micro_batch=8"),
    ],
    ids=" ".join,
)
def test_a_row_predicts_the_step_that_a_plan_predicts(overrides: tuple[str, ...]) -> None:
    """Under offload the update is on the host, and copies are a part of the step and of its interval."""
    common = ("launch=simulated", "cluster=8xh100", "model=1b", "precision=bf16_mixed", "train.global_batch=16")
    config, command = compose("world_size=2", "data=synthetic", *common, *overrides)
    plan = make_plan(config, machine_of_run(config.to_dict()), command)
    planned = predict(config, plan.layout, described_cluster(config.cluster), load_stack("harness"))
    entry = predicted_step_entry(plan)
    assert step_seconds(plan) == entry["step_seconds"] == pytest.approx(planned.step_seconds)
    assert (entry["low_seconds"], entry["high_seconds"]) == pytest.approx(planned.step_interval)
    assert entry["copy_seconds"] == pytest.approx(planned.time.copy_seconds)
    assert (entry["copy_seconds"] > 0) == (overrides != ("strategy=ddp",))
    ends = ("step_seconds", "low_seconds", "high_seconds")
    parts = sum(value for name, value in entry.items() if isinstance(value, float) and name not in ends)
    assert parts + sum(entry["exposed_seconds"].values()) == pytest.approx(entry["step_seconds"])


def test_a_run_is_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capacity, its pruning and every write of its record read the same prediction."""
    calls: list[str] = []
    for module, name in ((run_plan, "estimate_memory"), (prediction, "estimate_step_time")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _n=name, _f=function: (calls.append(_n), _f(*a))[1])
    plan = plan_on(H100)
    assert capacity_problem(plan, ()) is None and needs_at_least(plan, {"predicted_peak_bytes": 1})
    for _ in range(2):
        assert predicted_columns(plan) and predicted_step_entry(plan)
    ends = 2  # of the interval, which are predictions as well
    assert sorted(calls) == ["estimate_memory", *["estimate_step_time"] * (1 + ends)]


def test_the_cluster_s_own_file_counts_before_others() -> None:
    plan = plan_on(H100)
    slower = dataclasses.replace(DATASHEET, peak_flops=1e11, memory_bandwidth=1e9)
    cluster = dataclasses.replace(plan.config.cluster, hardware=slower)
    slow = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cluster=cluster))
    assert step_seconds(slow) > 2 * step_seconds(plan)


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty conf/cluster of the current folder, whose files are read anew."""
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hardware_in_files.cache_clear()
    yield folder
    hardware_in_files.cache_clear()


def test_a_calibrated_file_counts_before_a_datasheet_s(clusters: Path) -> None:
    slow = dataclasses.replace(DATASHEET, peak_flops=1e12, memory_bandwidth=1e10, calibrated=True)
    write_cluster(clusters / "z.yaml", "z", 8, slow)
    assert machine_hardware(H100) == slow
    assert described_devices()[H100.device_name] == DATASHEET


def test_a_calibrated_cpu_is_its_own_machine_in_the_dtype_that_was_measured(clusters: Path) -> None:
    """Files of another processor, or of other cores, say nothing of this one; nor does fp32 of 16 bit."""
    cpu = Machine("cpu", "cpu", 1, 2, 0, (2**34,), 2)
    cores = {"processor": processor_name(), "cores": 2}
    peak = {"peak_flops": 2e11, "peak_flops_dtype": "float32"}
    own = dataclasses.replace(DATASHEET, device_name="cpu", calibrated=True, **peak, **cores)  # type: ignore[arg-type]
    write_cluster(clusters / "a.yaml", "a", 2, dataclasses.replace(own, processor="Another", memory_bandwidth=1.0))
    write_cluster(clusters / "b.yaml", "b", 2, own)
    assert machine_hardware(cpu) == own
    assert machine_hardware(dataclasses.replace(cpu, cores=64)) is None
    plan = plan_on(cpu, "precision=fp32")
    assert step_seconds(plan) > 0
    bf16 = dataclasses.replace(plan.config.precision, name="bf16_mixed", compute="bfloat16")
    other = dataclasses.replace(plan, config=dataclasses.replace(plan.config, precision=bf16))
    assert other.prediction is None


@pytest.mark.parametrize("text", ["a: b: c", "- 1", "name: x\nhardware: {device_name: y}", "hardware: 3"])
def test_a_mistake_in_another_cluster_s_file_stops_no_run(text: str, clusters: Path) -> None:
    (clusters / "0.yaml").write_text(text)
    assert H100.device_name in described_devices()


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
    with pytest.raises(
        UserError, match=r"plan.top=5 needs a description of .*\(NVIDIA X1\): type harness calibrate first"
    ):
        order_by_plan([queued("ddp", machine=unknown)], PlanConfig(top=5))
    run = dataclasses.replace(queued("ddp"), plan=None)
    with pytest.raises(UserError, match=r"plan.validate=true cannot predict jobs of a cluster"):
        order_by_plan([run], PlanConfig(validate=True))
    with pytest.raises(UserError, match=r"plan.top=0 is not a number of configurations"):
        from_dict(PlanConfig, {"top": 0}, "plan")


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
    assert validation.regret == pytest.approx(0.25)
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
