"""The checks of the self-test on records of every kind: what must come of a step, and what is said otherwise."""

import dataclasses
import json
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness.cost_model.parts import STEP_PARTS
from harness.records.schema import Record
from harness.selftest import checks, observations, rank_variants
from harness.selftest.bench import Bench, StepFailedError, StepSkippedError
from harness.selftest.rank_variants import trace_path
from harness.selftest.results import anonymous
from harness.selftest.run import STEPS, Check
from tests.support.example_records import FAILED, MIB, record_of, row

TIMES = dict.fromkeys(STEP_PARTS, 0.0) | {"forward_seconds": 0.03, "idle_seconds": 0.01, "step_seconds": 0.04}

AT_PEAK = {"at_peak_parameter_bytes": 12 * MIB, "at_peak_activation_bytes": 8 * MIB}


def record(**changes: Any) -> Record:
    return record_of(row(1, "ddp", "torch", 0, attention_kernel="math", **TIMES, **AT_PEAK) | changes)


def failed(status: str, reason: str) -> Record:
    return record_of(row(1, "ddp", "torch", 0, **FAILED) | {"status": status, "reason": reason})


def slow_and_fast(**changes: Any) -> list[Record]:
    slow, fast = (dataclasses.replace(record(), config={"train": {"lr": rate}}) for rate in (1e-5, 1e-2))
    return [slow, fast.with_row(**changes)]


PREDICTED, PIPELINED = {"predicted_peak_bytes": 21 * MIB}, {"pipeline_bubble": 0.2, "pipeline_bubble_theory": 0.19}

PASSING: list[tuple[Check, list[Record], str]] = [
    (checks.ran, [record()], "12,346 tokens/s"),
    (checks.proven, [record()], "by 5e-06 at most"),
    (checks.memory_adds_up, [record()], "20.0 MiB at the peak: parameter 60%, activation 40%"),
    (checks.time_adds_up, [record()], "40.0 ms: 0% exposed communication, 25% idle"),
    (checks.memory_as_predicted, [record(**PREDICTED)], "none 1.05"),
    (checks.bubbles_as_in_theory, [record(**PIPELINED)], "ddp 0.200 (0.190)"),
    (checks.reason, [failed("oom", "rank 0 ran out")], "rank 0 ran out"),
    (checks.killed, [failed("error", "rank 1 was killed by SIGKILL; its log is empty")], "rank 1"),
    # Equal runs may differ by rounding alone, and a learning rate changes updates and not the first loss.
    (checks.same_twice, [record(), record(loss_last=3.2101)], "the last losses differ by 3e-05"),
    (checks.learns_at_every_rate, slow_and_fast(), "5.5450 at every learning rate"),
]

FAILING: list[tuple[Check, list[Record], str]] = [
    (checks.proven, [record(grad_deviation=None)], "was not compared"),
    (checks.memory_adds_up, [record(at_peak_parameter_bytes=MIB)], f"add up to {9 * MIB}, not to {20 * MIB}"),
    (checks.memory_adds_up, [record(**dict.fromkeys(AT_PEAK))], "what fills it is not known"),
    (checks.memory_adds_up, [record(peak_allocated_bytes=None)], "has no peak of memory"),
    (checks.time_adds_up, [record(idle_seconds=0.02)], "add up"),
    (checks.time_adds_up, [record(idle_seconds=None)], "its trace could not be split"),
    (
        checks.memory_as_predicted,
        [record(predicted_peak_bytes=30 * MIB)],
        "not within 10% of 1: ddp, model=tiny, checkpointing=none 1.50",
    ),
    (checks.bubbles_as_in_theory, [record(**PIPELINED | {"pipeline_bubble": 0.4})], "far above"),
    (
        checks.killed,
        [failed("error", "rank 0 was killed by SIGKILL")],
        "does not say 'rank 1 was killed by SIGKILL'",
    ),
    (checks.same_twice, [record(), record(loss_last=3.3)], "of two equal runs are 3.21 and 3.3"),
    (checks.learns_at_every_rate, slow_and_fast(loss_first=5.6), "differ with the learning rate"),
    (checks.learns_at_every_rate, slow_and_fast(loss_last=5.545), "does not fall: -2.3 at 1e-05, +0 at 0.01"),
]


@pytest.mark.parametrize(("check", "records", "words"), PASSING)
def test_a_check_passes(check: Check, records: list[Record], words: str) -> None:
    assert words in check(Bench(Path()), records)


@pytest.mark.parametrize(("check", "records", "problem"), FAILING)
def test_a_check_fails(check: Check, records: list[Record], problem: str) -> None:
    with pytest.raises(StepFailedError, match=re.escape(problem)):
        check(Bench(Path()), records)


def test_a_run_that_ends_otherwise_is_named_with_its_reason() -> None:
    checks.require_status([failed("oom", "rank 0 ran out")], "oom")
    with pytest.raises(StepFailedError, match="ended as error, and ok is expected: lost"):
        checks.require_status([record(), failed("error", "lost")], "ok")


def test_a_hang_needs_stack_traces(tmp_path: Path) -> None:
    bench, hanging = Bench(tmp_path), failed("timeout", "killed after 20 s without progress of any rank")
    stacks = bench.folder(hanging).stacks(1)
    stacks.parent.mkdir(parents=True)
    for text in (None, "", 'File "graph.py", line 1'):
        if text is not None:
            stacks.write_text(text)
        with pytest.raises(StepFailedError, match="no stack traces show where the last rank hangs"):
            checks.hung(bench, [hanging])
    stacks.write_text(f'File "{checks.HANGING_MODULE}", line 1')
    assert "without progress" in checks.hung(bench, [hanging])


@pytest.mark.parametrize(
    ("categories", "gpus", "expected"),
    [
        (("cpu_op", "kernel"), 2, ""),
        (("cpu_op",), 0, ""),
        (("cpu_op", "gpu_memcpy"), 2, "lists 1 cpu_op, 1 gpu_memcpy"),
        (("user_annotation",), 0, "lists 1 user_annotation"),
        (None, 0, "rank 1 left no trace file"),
    ],
)
def test_a_trace_file_lists_operators_and_what_ran_on_a_device(
    tmp_path: Path, categories: tuple[str, ...] | None, gpus: int, expected: str
) -> None:
    machine = SimpleNamespace(device="cuda" if gpus else "cpu", devices=gpus)
    bench, traced = Bench(tmp_path), record()
    bench.__dict__["machine"] = machine
    for rank, listed in enumerate((("cpu_op", "kernel"), categories)):
        path = trace_path(bench.folder(traced), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        events = [{"ph": "X", "cat": category} for category in listed or ()]
        path.write_text("" if listed is None else json.dumps({"traceEvents": events}))
    passes = nullcontext() if not expected else pytest.raises(StepFailedError, match=expected)
    with passes:
        assert "1 operators and" in observations.trace_files_are_whole(bench, [traced])


def test_bubbles_without_bound_devices_are_compared_with_the_same_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, bound, usual = Bench(Path()), record(pipeline_bubble=0.3), record(pipeline_bubble=0.1)
    bench.records = {("bound_rank", "model=a", "repeat=1"): bound, ("worker_entry", "model=a"): usual}
    assert "ddp 0.100 (0.300)" in checks.no_better_with_bound_devices(bench, [bound])
    bench.records = {("bound_rank", "model=a", "repeat=1"): usual, ("worker_entry", "model=a"): bound}
    with pytest.raises(StepFailedError, match=r"larger than with device_id .*: ddp 0.300 \(0.100\)"):
        checks.no_better_with_bound_devices(bench, [usual])


def test_a_bound_rank_joins_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[dict[str, Any]] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **keywords: joined.append(keywords))
    monkeypatch.setattr(rank_variants, "worker_entry", lambda _: dist.init_process_group("nccl", timeout=1))
    rank_variants.bound_rank("")
    dist.init_process_group("nccl")
    assert [str(keywords.get("device_id")) for keywords in joined] == ["cuda:3", "None"]


@pytest.mark.parametrize(("nodes", "expected"), [("n1\nn1\n", "sinfo lists 1"), (None, "there is none here")])
def test_two_nodes_need_a_slurm_with_two(monkeypatch: pytest.MonkeyPatch, nodes: str | None, expected: str) -> None:
    def sinfo(*_: Any, **__: Any) -> SimpleNamespace:
        if nodes is None:
            raise FileNotFoundError("sinfo")
        return SimpleNamespace(stdout=nodes, returncode=0)

    monkeypatch.setattr(subprocess, "run", sinfo)
    with pytest.raises(StepSkippedError, match=f"needs a Slurm with two nodes; {expected}"):
        observations.two_nodes(Bench(Path()), [])


def test_memory_that_an_ended_run_does_not_release_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Path())
    bench.__dict__["machine"] = SimpleNamespace(free_bytes=(70 * 2**30,))
    free = iter([60 * 2**30, 70 * 2**30])
    monkeypatch.setattr(observations, "detect_machine", lambda _: SimpleNamespace(free_bytes=(next(free),)))
    assert "was free" in observations.memory_is_released(bench, [record()])
    monkeypatch.setattr(observations, "wait_for_release", lambda *_: "30 s after the run device 0 has 9 GiB less")
    with pytest.raises(StepFailedError, match="9 GiB less"):
        observations.memory_is_released(bench, [record()])


def test_the_file_names_neither_host_nor_home_nor_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SOME_TOKEN", "a1b2c3d4e5f6g7h8")
    lines = ["[node-7]:29500 at /home/ada/x.py", "node-71 /home/adams", "with a1b2c3d4e5f6g7h8"]
    assert anonymous({"logs": lines})["logs"] == ["[HOST]:29500 at ~/x.py", "node-71 /home/adams", "with [secret]"]


def test_steps_go_from_any_machine_to_many_devices() -> None:
    gpus = [step.gpus for step in STEPS]
    assert gpus == sorted(gpus) and gpus[0] == 0 and gpus[-1] == 8
    assert len({step.name for step in STEPS}) == len(STEPS)
