"""Runs are proven whether or not one process can hold the model, and no slow reference takes a row with it."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from harness.config.command import CommandConfig
from harness.config.schema import RunConfig
from harness.proof.bounds import noise_floors
from harness.proof.reference import merge_reports
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_record
from harness.runner import reference_runs
from harness.runner.launch_run import RunContext, launch_run
from harness.runner.plan import make_plan
from harness.runner.record import Reference
from harness.runner.reference_cost import measured_speed, predict_cost
from harness.runner.resolve import detect_machine, with_layers
from harness.runner.run import execute
from tests.support import faults, second_training
from tests.support.commands import SMALL_BATCH, Entry, Harness, assert_ok, compose, long, run_with

# With full checkpointing, fsdp_full_shard needs 6.7 MB, zero3 8.1 MB and a single process 8.7 MB.
BUDGET = 7_400_000

TINY = (*SMALL_BATCH, "world_size=2", "data=synthetic", "checkpointing=full", f"cluster.memory_budget={BUDGET}")


class Chain:
    """The runs of one comparison under a budget in which no single process fits."""

    def __init__(self, results: Path, *overrides: str) -> None:
        self.results, self.overrides = results, overrides
        self.lines: list[str] = []

    def compose(self, *overrides: str) -> tuple[RunConfig, CommandConfig]:
        return compose(f"results_dir={self.results}", "name=chain", *self.overrides, *overrides)

    def run(self, *overrides: str, **entry: Entry) -> Record:
        config, command = self.compose(*overrides)
        plan = make_plan(config, detect_machine(config.cluster), command)
        return execute(plan, RunContext(log=self.lines.append, **entry))

    def references(self, pattern: str = "*") -> Iterator[Record]:
        """Yield the records of the references of this name."""
        for folder in ComparisonFolder(self.results / "chain" / "references").recorded_runs(pattern):
            yield read_record(folder.path)

    def forget(self, pattern: str) -> None:
        """Remove the references of this name, so that they are trained again."""
        for record in list(self.references(pattern)):
            shutil.rmtree(self.results / "chain" / "references" / record.run_id)


def layers_of(record: Record) -> int:
    return int(record.config["model"]["num_hidden_layers"])


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"), *TINY)


def test_a_chain_proves_a_run_where_no_single_process_fits(chain: Chain) -> None:
    record = chain.run("strategy=tp")
    row = record.row
    assert_ok(row)
    assert 0 < row["grad_deviation"] < 1e-4
    by_layout = {(reference.row["strategy"], layers_of(reference)): reference for reference in chain.references()}
    assert sorted(by_layout) == [("fsdp_full_shard", 2), ("fsdp_full_shard", 4), ("single", 2)]
    single, shallow, sharded = (by_layout[key] for key in (("single", 2), *sorted(by_layout)[:2]))
    assert row["reference_layers"] == 2 and row["reference"] == record.proof["reference"] == (
        f"compared with {sharded.run_id}; its layout was compared on 2 of 4 layers with {single.run_id}"
    )
    assert row["reference_seconds"] == pytest.approx(sum(r.row["duration_seconds"] for r in by_layout.values()))
    assert shallow.row["reference"] == f"compared with {single.run_id}"
    assert 0 < shallow.row["grad_deviation"] < 1e-4 and single.row.get("grad_deviation") is None
    assert all(reference.row["memory_limit_bytes"] == BUDGET for reference in by_layout.values())
    announced, *lines = chain.lines
    assert announced == "3 references before this run, of unknown duration"
    assert [line.partition(",")[0] for line in lines] == [
        f"reference {reference.run_id}" for reference in (single, shallow, sharded)
    ]
    assert lines[0].endswith(", of unknown duration, up to timeout_seconds=1800")
    predicted = re.fullmatch(rf".*, predicted to train for [\d,]+ s at the speed of {single.run_id}", lines[1])
    assert predicted, lines


def test_a_reference_that_is_predicted_to_be_slow_takes_no_row_with_it(chain: Chain) -> None:
    """The references that the test above trained tell the speed of this machine."""
    config, command = chain.compose("strategy=tp", "train.warmup_steps=1000000", "timeout_seconds=60")
    plan = make_plan(config, detect_machine(config.cluster), command)
    reference = reference_runs.get_reference(plan, RunContext(log=pytest.fail))
    seconds, _ = predict_cost(plan, measured_speed(plan))
    assert seconds > 60
    assert reference.report is None
    slow = r"fsdp_full_shard on 2 ranks with checkpointing=full is too slow: it would train for [\d,]+ s at the speed"
    assert re.search(rf"; {slow} of \S+, more than 50% of timeout_seconds=60$", reference.note), reference.note


def test_a_fault_in_the_references_layout_is_an_error(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run and reference have the same layout and the same fault: they agree, and only the chain tells that it is wrong.

    Rank 1 trains on rank 0's data, which a single process cannot do. DeepSpeed's layout does not fit the budget.
    """
    chain.forget("fsdp_full_shard-*")
    monkeypatch.setattr(reference_runs, "worker_entry", faults.other_data)
    row = chain.run("strategy=fsdp_full_shard", entry=faults.other_data).row
    assert row["status"] == "error" and row.get("tokens_per_second") is None
    faulty = next(record for record in chain.references("fsdp_full_shard-*"))
    assert layers_of(faulty) == 2 and faulty.row["grad_deviation"] > 0.01
    failed = f"the reference {faulty.run_id} failed, and nothing else proves this run: not proven: gradient deviates"
    assert row["reason"].startswith(failed), row["reason"]


LARGER = (
    *("model.hidden_size=320", "model.intermediate_size=864", "model.num_hidden_layers=6", "model.vocab_size=4000"),
    *("train.global_batch=4", "train.micro_batch=1", "train.seq_len=128", "train.steps=2", "train.warmup_steps=2"),
    *("world_size=2", "checkpointing=full", "data=text"),
)

DEEPER = (*SMALL_BATCH, "model.num_hidden_layers=7", "train.steps=2", "world_size=2", "data=synthetic")


@pytest.mark.parametrize(
    "overrides",
    [
        long((*DEEPER, "cluster.memory_budget=12500KB")),
        long((*LARGER, "checkpointing=none", "cluster.memory_budget=140MB")),
    ],
    ids=["tiny", "ten million parameters"],
)
def test_a_chain_is_as_deep_and_as_long_as_is_cheap(
    overrides: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded run tells how fast the machine is, and nothing may take longer than a run.

    A single process then trains three layers, of four that fit, and all references one timed step of two.
    """
    chain = Chain(tmp_path, *overrides)
    monkeypatch.setattr(reference_runs, "CHEAP_SECONDS", 0.0)
    assert_ok(chain.run("strategy=tp", "proof.reference=false", "repeat=1").row)
    record = chain.run("strategy=tp")
    row, train = record.row, record.config["train"]
    assert_ok(row)
    steps = train["warmup_steps"] + train["steps"] + 3
    layers = sorted((reference.row["strategy"], layers_of(reference)) for reference in chain.references())
    assert layers == [
        ("fsdp_full_shard", 3),
        ("fsdp_full_shard", record.config["model"]["num_hidden_layers"]),
        ("single", 3),
    ]
    assert all(reference.config["train"]["steps"] == 1 for reference in chain.references())
    assert row["proven_steps"] == steps - 1 and row["reference_layers"] == 3
    assert row["reference"].endswith(f"; only the first {steps - 1} of {steps} steps were compared")
    assert 0 < row["grad_deviation"] < 1e-4
    assert not any("last gradients" in check["where"] for check in record.proof["checks"])
    announced = [line for line in chain.lines if not line.startswith("reference ")]
    assert len(announced) == 1 and re.match(r"3 references before this run, predicted to take \d+ s: ", announced[0])

    chain.lines.clear()  # every reference is recorded now, and the machine seems to be another
    assert chain.run("strategy=tp", "repeat=2").row["reference"] == row["reference"] and chain.lines == []
    faulty = chain.run("strategy=tp", "repeat=3", entry=faults.halved).row
    assert faulty["status"] == "error" and faulty["reason"].startswith("not proven: "), faulty["reason"]
    chain.forget("fsdp_full_shard-*")
    monkeypatch.setattr(reference_runs, "worker_entry", faults.other_data)
    row = chain.run("strategy=tp", "repeat=4").row
    assert row["status"] == "error"
    assert "failed, and nothing else proves this run: not proven: gradient deviates" in row["reason"], row["reason"]


@pytest.mark.long
def test_runs_side_by_side_share_a_chain(harness: Harness, tmp_path: Path) -> None:
    """Both need the same references, which no single process can train: the first trains each, the other waits."""
    done = harness("-m", "strategy=tp,fsdp_full_shard", "sweep.parallel=2", "name=chain", "train.steps=4", *TINY)
    assert done.returncode == 0, done.stderr
    comparison = ComparisonFolder(tmp_path / "results" / "chain")
    records = [read_record(folder.path) for folder in comparison.recorded_runs()]
    starts = [datetime.fromisoformat(record.row["started_at"]).timestamp() for record in records]
    ends = [start + record.row["duration_seconds"] for start, record in zip(starts, records, strict=True)]
    assert len(records) == 2 and max(starts) < min(ends)
    references = [read_record(folder.path) for folder in ComparisonFolder(comparison.references).recorded_runs()]
    assert len(references) == 3 == done.stderr.count("\nreference ")
    assert all(reference.row["memory_limit_bytes"] == BUDGET for reference in references)
    (chained,) = [r for r in references if layers_of(r) == 4]
    for record in records:
        assert_ok(record.row)
        assert record.row["reference"].startswith(f"compared with {chained.run_id}; its layout was compared on")


@pytest.mark.long
def test_a_reference_of_deepspeed_trains_twice(tmp_path: Path) -> None:
    """Fully sharded ranks of PyTorch are compared with it. Its first engine is released before it builds another."""
    config, command = compose(f"results_dir={tmp_path}", "world_size=2", *SMALL_BATCH, "strategy=zero3")
    plan = make_plan(config, detect_machine(config.cluster), command, is_reference=True)
    record = launch_run(plan, RunContext(second_training.record_remaining_memory), Reference("none"))
    assert_ok(record.row)
    remaining = [int(second_training.remaining_file(plan.folder.path, rank).read_text()) for rank in range(2)]
    assert max(remaining) < record.row["parameter_bytes"] / 100
    report = merge_reports(reference_runs.read_reports(plan))
    assert report.perturbed is not None and report.perturbed.losses != report.losses
    floors = noise_floors(report, report.perturbed, "float32").of_aspects.values()
    assert 0 < max(floors) < 1e-2


def test_a_reference_that_hangs_takes_no_row_with_it(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("strategy=ddp", "train.seed=6")
    config, command = compose(
        f"results_dir={results}", "name=shared", "world_size=2", *SMALL_BATCH, *overrides, "hang_seconds=3"
    )
    with monkeypatch.context() as patched:
        patched.setattr(reference_runs, "worker_entry", faults.stuck_everywhere)
        plan = make_plan(config, detect_machine(config.cluster), command)
        note = reference_runs.get_reference(plan, RunContext()).note
    assert note.startswith("none: a single process is too slow: it ran into a time limit: killed after 3 s"), note
    row = run_with(results, *overrides).row
    assert (row["status"], row["reference"], row.get("loss_deviation")) == ("ok", note, None), row["reason"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["tp", "zero3", "fsdp_full_shard", "pp_1f1b"])
def test_ten_million_parameters_are_proven_by_a_chain(large_chain: Chain, strategy: str) -> None:
    row = large_chain.run(f"strategy={strategy}").row
    print(strategy, {key: row.get(key) for key in SHOWN})
    assert 9e6 < row["parameters"] < 1e7
    assert_ok(row)
    assert 0 < row["grad_deviation"] < 1e-4 and 1 <= row["reference_layers"] < 6


SHOWN = ("status", "parameters", "reference", "reference_layers", "reference_seconds", "loss_deviation")


@pytest.fixture(scope="module")
def large_chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("large"), *LARGER, "cluster.memory_budget=130MB")


@pytest.mark.long
@pytest.mark.parametrize("fault", [faults.other_data, faults.halved])
def test_a_fault_in_a_large_references_layout_is_an_error(
    large_chain: Chain, monkeypatch: pytest.MonkeyPatch, fault: Entry
) -> None:
    large_chain.forget("fsdp_full_shard-*")
    monkeypatch.setattr(reference_runs, "worker_entry", fault)
    row = large_chain.run("strategy=tp", f"repeat={len(fault.__name__)}").row
    print(fault.__name__, row["reason"])
    assert row["status"] == "error"
    assert "failed, and nothing else proves this run: not proven: " in row["reason"]


def test_a_hugging_face_model_is_traced_again_with_fewer_layers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 300, **sizes})
    )
    config, _ = compose("model=hf", f"model.path={tmp_path}", "strategy=ddp", "train.seq_len=16")
    assert with_layers(config, 3) == config
    shallow = with_layers(config, 2)
    assert shallow.model.hf_info is not None and config.model.hf_info is not None
    assert shallow.model.hf_info.shapes.items() < config.model.hf_info.shapes.items()
    assert shallow == replace(config, model=replace(shallow.model, num_hidden_layers=2))
    assert (shallow.model.num_hidden_layers, len(shallow.model.hf_info.layers)) == (2, 2)
