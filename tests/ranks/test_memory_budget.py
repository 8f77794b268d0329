"""A memory budget per rank ends a run that needs more, and changes nothing otherwise."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from harness.config.command import CommandConfig
from harness.config.fingerprint import result_affecting_keys
from harness.config.schema import RunConfig
from harness.cost_model.memory import estimate_memory
from harness.hardware.machine import Machine
from harness.layout.layout import resolve_layout
from harness.records.schema import Record
from harness.runner.launch_run import RunContext, launch_run
from harness.runner.plan import RunPlan, capacity_problem, fits_now, machine_problems, make_plan
from harness.runner.record import Reference
from harness.runner.resolve import detect_machine
from harness.runner.run import pruning_reason
from harness.sweep.queued_run import MicroBatchSearch
from harness.util.text import UserError, format_bytes, parse_bytes
from tests.support.commands import assert_ok, compose, compose_config, execute_run
from tests.support.models import PREPARED

RUN = ("data=synthetic", "train.seq_len=64", "train.steps=2", "train.warmup_steps=1", "preflight=false")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("108MiB", 113_246_208),
        ("24GB", 24 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("1.5KiB", 1536),
        ("0.1MB", 100_000),
        ("7KB", 7000),
        ("12B", 12),
        ("4096", 4096),
        (4096, 4096),
        (1e9, 10**9),  # as YAML reads it
    ],
)
def test_byte_sizes_are_parsed(text: str | int | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(5, "5 B"), (2048, "2.0 KiB"), (113_246_208, "108.0 MiB"), (24 * 2**30, "24.0 GiB")]
)
def test_byte_sizes_are_formatted(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "wrong",
    ["", "lots", "24 gib", "24Gb", "24", 24, "24.5", "-1GiB", "0", "0.5B", "1e3GiB", 1e30, "٣GB", "9999999999GiB"],
)
def test_an_invalid_size_is_refused_with_examples(wrong: str | float) -> None:
    answer = "did you mean (24.*)GiB or \\1GB" if str(wrong).startswith("24") else "choose .* GiB, .* KB, B,"
    with pytest.raises(UserError, match=f"^a.key={re.escape(str(wrong))} is not a size .*: {answer}") as e:
        parse_bytes(wrong, "a.key")
    assert "\n" not in str(e.value)


# ---------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budget")


def budget_run(results: Path, *overrides: str) -> tuple[RunConfig, Record]:
    config, command = compose(f"results_dir={results}", "name=budget", *RUN, *overrides)
    return config, execute_run(config, command)


@pytest.fixture(scope="module", params=["single", "pp_1f1b"])  # ddp's peak can differ by 148 bytes
def unbounded(results: Path, request: pytest.FixtureRequest) -> tuple[str, Record]:
    _, record = budget_run(results, f"strategy={request.param}")
    assert record.row["status"] == "ok" and record.row["memory_limit_bytes"] is None
    return request.param, record


def test_a_budget_of_the_peak_changes_nothing(results: Path, unbounded: tuple[str, Record]) -> None:
    strategy, free = unbounded
    peak = free.row["peak_allocated_bytes"]
    _, limited = budget_run(results, f"strategy={strategy}", f"cluster.memory_budget={peak}", "proof.reference=false")
    assert (limited.row["status"], limited.row["memory_limit_bytes"]) == ("ok", peak), limited.row["reason"]
    assert limited.row["run_id"] != free.row["run_id"]
    for figure in ("peak_allocated_bytes", "loss_first", "loss_last"):
        assert limited.row[figure] == free.row[figure] is not None


def test_a_byte_less_is_out_of_memory_and_ends_every_rank(results: Path, unbounded: tuple[str, Record]) -> None:
    strategy, free = unbounded
    budget = free.row["peak_allocated_bytes"] - 1
    overrides = (f"cluster.memory_budget={budget}", "proof.reference=false")
    config, ended = budget_run(results, f"strategy={strategy}", *overrides)
    row = ended.row
    assert (row["status"], row["memory_limit_bytes"], row["failed_in_phase"]) == ("oom", budget, "timed"), row["reason"]
    blamed = re.match(
        r"rank (\d) ran out of memory in phase timed under cluster.memory_budget=(\d+): (\d+) bytes requested, (\d+)"
        r" allocated, of a budget of \2 bytes$",
        row["reason"],
    )
    assert blamed is not None, row["reason"]
    rank, limit, requested, allocated = map(int, blamed.groups())
    assert allocated <= limit < allocated + requested and row["last_seen_allocated_bytes"] <= limit == budget
    assert row["duration_seconds"] < 30 and row.get("peak_allocated_bytes") is None
    if strategy == "pp_1f1b":  # the other holds less, and came to its end when this one was gone
        fullest = free.row["peak_rank"]
        assert rank == fullest
        assert [other["status"] for other in ended.rank_entries if other["rank"] != fullest] in ([], ["error"])
    check_dominated(config, CommandConfig("budget", str(results)))


def test_a_budget_does_not_limit_a_references_second_training(results: Path, unbounded: tuple[str, Record]) -> None:
    """Divided products need more memory than whole ones."""
    strategy, free = unbounded
    budget = f"cluster.memory_budget={free.row['peak_allocated_bytes']}"
    config, command = compose(f"results_dir={results}", "name=second", *RUN, f"strategy={strategy}", budget)
    plan = make_plan(config, detect_machine(config.cluster), command, is_reference=True)
    record = launch_run(plan, RunContext(), Reference("none"))
    assert_ok(record.row)
    reports = plan.folder.read_rank_reports(plan.layout.world_size)
    assert all(report.perturbed is not None for report in reports)


def check_dominated(config: RunConfig, command: CommandConfig) -> None:
    """Check which runs are pruned: those as large or larger at the same budget, and none that is smaller anywhere."""
    budget: Any = config.cluster.memory_budget
    deeper = "ran out of memory at model.num_hidden_layers=4 with the same layout"
    # A pipeline's larger micro-batches are fewer.
    both = "model.num_hidden_layers=6 and train.micro_batch=2 needs no less" if config.strategy.pp == 1 else ""
    for its_budget, layers, micro_batch, words in (
        (f"{budget}B", 6, 1, deeper),
        (budget, 6, 2, both),
        *((budget + 1, 6, 1, None), (None, 6, 1, None), (budget, 4, 1, None), (budget, 2, 2, None)),
    ):
        changed = dataclasses.replace(
            config,
            cluster=dataclasses.replace(config.cluster, memory_budget=its_budget),
            model=dataclasses.replace(config.model, num_hidden_layers=layers),
            train=dataclasses.replace(config.train, micro_batch=micro_batch),
        )
        reason = pruning_reason(make_plan(changed, detect_machine(config.cluster), command))
        assert reason is None if words is None else words in (reason or ""), (its_budget, layers, micro_batch)


# ---------------------------------------------------------------- before anything runs


def test_a_budget_is_part_of_a_runs_identity_however_it_is_written() -> None:
    none, written, counted = (
        result_affecting_keys(compose_config("strategy=ddp", f"cluster.memory_budget={budget}").to_dict())
        for budget in ("null", "108MiB", 113_246_208)
    )
    assert "memory_budget" not in none["cluster"]
    assert written == counted != none


def test_a_budget_on_a_cpu_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config("strategy=ddp", "cluster.memory_budget=1GiB", "data=synthetic")
    machine = detect_machine(config.cluster)
    make_plan(config, machine)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^cluster.memory_budget=1GiB needs .* no C\+\+ compiler: .* or choose null$"):
        make_plan(config, machine)
    make_plan(dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, memory_budget=None)), machine)


GPUS = Machine("cuda", "", 1, 2, devices=2, free_bytes=(2**34,) * 2, cores=2, device_bytes=2**34)

TOO_LARGE = "cluster.memory_budget=17GiB is more than the 16.0 GiB of a device: choose as much or less, or null"


@pytest.mark.parametrize(("budget", "problems"), [("null", []), ("16GiB", []), ("17GiB", [TOO_LARGE])])
def test_a_budget_above_the_devices_memory_is_refused(budget: str, problems: list[str]) -> None:
    config = compose_config("strategy=ddp", f"cluster.memory_budget={budget}")
    assert list(machine_problems(config, resolve_layout(config.strategy, 2), GPUS)) == problems


ROOMY = Machine("cpu", "cpu", 1, 2, devices=0, free_bytes=(2**45,), cores=2)

PLANNED = ("strategy=zero3", "model=350m", "train.seq_len=128", "train.global_batch=16", "data=synthetic")


def planned(*overrides: str) -> RunPlan:
    config, command = compose(*PLANNED, *overrides)
    return make_plan(config, ROOMY, command)


def test_a_run_predicted_to_exceed_its_budget_is_refused() -> None:
    free = planned("train.micro_batch=2")
    peak = estimate_memory(free.config, free.layout, free.widths, "cpu").peak_bytes
    assert capacity_problem(free, PREPARED) is None
    assert capacity_problem(planned("train.micro_batch=2", f"cluster.memory_budget={peak}"), PREPARED) is None
    short = ("train.micro_batch=2", f"cluster.memory_budget={peak - 1}B")
    reason = capacity_problem(planned(*short), PREPARED)
    assert reason is not None and "\n" not in reason
    assert reason.startswith(f"model=350m needs {format_bytes(peak)} a rank (")
    assert f"cluster.memory_budget={peak - 1}B is less: choose " in reason and "or checkpointing=" in reason
    assert "or a larger cluster.memory_budget, or preflight=false to try, or model=" in reason
    assert "process" not in reason  # only tensors are held to it
    for remedy in re.findall(r"(checkpointing=\w+|model=\w+) \(", reason.partition(": choose ")[2]):
        assert capacity_problem(planned(*short, remedy), PREPARED) is None, remedy
    assert capacity_problem(planned(*short, "preflight=false"), PREPARED) is None
    small = dataclasses.replace(ROOMY, free_bytes=(2**30,))  # of both limits the machine's is said
    assert "1.0 GiB are available" in (
        capacity_problem(dataclasses.replace(planned(*short), machine=small), PREPARED) or ""
    )


def test_the_micro_batch_search_starts_below_the_budget() -> None:
    sizes = (1, 2, 4)
    two = planned("train.micro_batch=2")
    budget = estimate_memory(two.config, two.layout, two.widths, "cpu").peak_bytes
    plans = [planned(f"train.micro_batch={size}", f"cluster.memory_budget={budget}") for size in sizes]
    assert MicroBatchSearch(plans, fits_now).first.config.train.micro_batch == 2
