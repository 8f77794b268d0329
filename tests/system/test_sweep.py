"""The runs of one command: their order, what is skipped or repeated, side by side, and as seen from another shell."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from datetime import datetime
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import status
from harness.config.arguments import normalize_arguments
from harness.config.command import CommandConfig
from harness.hardware.device_placement import DevicePlacement
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_all
from harness.sweep import command_file, scheduler
from harness.sweep.display import ProgressDisplay
from harness.sweep.parallel import ParallelExecutor, WorkerSlot, start_process
from harness.sweep.queued_run import (
    MicroBatchSearch,
    QueuedRun,
    StopAfter,
    deduplicate_and_sort,
    parse_stop_after,
    queue_plan,
)
from harness.sweep.scheduler import Scheduler, SequentialExecutor
from harness.util.text import UserError, format_duration
from tests.support import faults
from tests.support.commands import ROOT, SMALL, Harness, compose, compose_config, execute_run, read_rows
from tests.support.slurm_cluster import wait_for_step


def queued(name: str, repeat: int, *overrides: str) -> QueuedRun:
    return QueuedRun(*compose("name=order", *overrides), None, name, repeat)


def test_cheap_runs_come_first_each_once_and_repeats_last() -> None:
    queue = [
        queued("large", 0, "model=125m"),
        queued("large again", 1, "model=125m"),
        queued("batch", 0, "train.global_batch=16"),
        queued("ddp", 0),
        queued("zero3", 0, "strategy=zero3"),
        queued("ddp", 0),
        queued("ddp again", 1),
        queued("short", 0, "train.steps=1"),
    ]
    names = ["short", "ddp", "zero3", "batch", "large", "ddp again", "large again"]
    assert [run.name for run in deduplicate_and_sort(queue)] == names


@pytest.mark.parametrize(
    ("stated", "limits"),
    [
        ([], {}),
        ([3600], {"s": 3600}),
        (["90m", "20runs"], {"s": 5400, "runs": 20}),
        (["1.5h", "3failures"], {"s": 5400, "failures": 3}),
        (["20d"], {"s": 1728000}),
    ],
)
def test_a_budget_is_parsed_and_limits(stated: list[Any], limits: dict[str, float]) -> None:
    limit = parse_stop_after(stated)
    assert limit.limits == limits and not limit.exceeded_limit()
    limit.started, limit.failed = 20, 3
    reached = [f"stop_after={number}{unit} is reached" for unit, number in limits.items() if unit != "s"]
    assert limit.exceeded_limit() == "".join(reached)
    limit.started_at -= 1728000
    assert not limits or limit.exceeded_limit() == f"stop_after={limits['s']}s is reached"


@pytest.mark.parametrize("wrong", ["soon", "8 hours", "1.5runs", "-1h", "runs"])
def test_a_wrong_budget_is_an_error_with_the_choices(wrong: str) -> None:
    with pytest.raises(UserError, match="choose a time such as 90m or 8h, 20runs, or 3failures"):
        parse_stop_after([wrong])


def test_a_comma_in_a_list_starts_no_sweep() -> None:
    arguments = ["strategy=ddp,tp", "retry=error,timeout", "-m", "stop_after=8h", "retry=[oom]"]
    normalized = ["-m", "strategy=ddp,tp", "retry=[error,timeout]", "stop_after=[8h]", "retry=[oom]"]
    assert normalize_arguments(arguments) == normalized


def sized(size: int) -> Any:
    """Return a stand-in for a plan with the attributes that a search reads."""
    config = SimpleNamespace(train=SimpleNamespace(micro_batch=size))
    return SimpleNamespace(size=size, config=config, command=CommandConfig(), run_id="ddp-none-tiny-w2-0")


@given(sizes=st.integers(1, 10), fitting=st.integers(0, 10), predicted=st.integers(0, 10))
def test_a_search_finds_the_largest_micro_batch_however_wrong_the_prediction(
    sizes: int, fitting: int, predicted: int
) -> None:
    """No size is tried twice, and the size above the result is known not to fit."""
    search = MicroBatchSearch([sized(2**index) for index in range(sizes)], lambda plan: plan.size < 2**predicted)
    tried, plan = [], search.first
    while plan is not None:
        tried.append(plan.size)
        plan = search.next(Record({"status": "ok" if plan.size < 2**fitting else "oom"}))
    largest = min(fitting, sizes) - 1
    assert len(set(tried)) == len(tried)
    assert (f" {2**largest} fits" if largest >= 0 else ": no micro-batch is ok") in search.result()
    assert largest == sizes - 1 or 2 ** (largest + 1) in tried


def test_a_search_ends_at_a_failure_that_is_not_about_memory() -> None:
    search = MicroBatchSearch([sized(1), sized(2), sized(4)], lambda plan: plan.size < 4)
    assert search.next(Record({"status": "error"})) is None
    assert search.result().endswith(": no micro-batch is ok; 2 is error")


def test_a_search_goes_on_from_the_runs_that_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The micro-batches 1 and 2 are on file, and 8 does not fit."""
    monkeypatch.setattr(scheduler, "has_free_space", lambda path: True)
    executor, started = MagicMock(), []
    executor.stored_record = lambda run: Record({"status": "ok"}) if run.plan.size <= 2 else None
    executor.start = started.append
    executor.poll = lambda: [(started[-1], Record({"status": "ok" if started[-1].plan.size < 8 else "oom"}))]
    search = MicroBatchSearch([sized(2**index) for index in range(4)], lambda plan: plan.size <= 2)
    Scheduler(executor, StopAfter(), [queue_plan(search.first, search=search)]).run()
    shown = [call.args[0].plan.size for call in executor.display.run_ended.call_args_list]
    assert shown == [2, 4, 8] and [run.plan.size for run in started] == [4, 8]
    assert search.result().endswith(": 4 fits; 8 is oom")


def test_a_run_finds_its_largest_micro_batch(harness: Harness, tmp_path: Path) -> None:
    done = harness("name=max", "strategy=ddp", "train.micro_batch=max", "proof.reference=false", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "train.micro_batch=max of ddp-none-tiny-w2: 4 fits" in done.stderr
    assert list(read_rows(tmp_path / "results", "max").micro_batch) == [4]


def test_a_run_out_of_memory_is_a_result_and_spares_larger_batches(harness: Harness, tmp_path: Path) -> None:
    sweep = ("name=spared", "strategy=ddp", "proof.reference=false", *SMALL)
    config, command = compose(*sweep, f"results_dir={tmp_path}/results", "train.micro_batch=2")
    assert execute_run(config, command, faults.exhausted).row["status"] == "oom"
    recorded_at = mtimes(tmp_path / "results")
    assert harness("-m", "train.micro_batch=1,2,4", *sweep).returncode == 0
    rows = read_rows(tmp_path / "results", "spared").set_index("micro_batch")
    assert rows.status.to_dict() == {1: "ok", 2: "oom", 4: "refused"}
    assert rows.reason[4].startswith(f"not tried: {rows.run_id[2]} ran out of memory at train.micro_batch=2")
    assert mtimes(tmp_path / "results").items() >= recorded_at.items()
    # The same command runs nothing; the run itself, or a sweep without sparing, runs it.
    recorded_at = mtimes(tmp_path / "results")
    assert harness("-m", "train.micro_batch=1,2,4", *sweep).returncode == 0
    assert mtimes(tmp_path / "results") == recorded_at
    assert harness("train.micro_batch=4", *sweep).returncode == 0


def mtimes(results: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in results.glob("*/*/record.json")}


def test_retry_names_the_failures_that_are_run_again(harness: Harness, tmp_path: Path) -> None:
    run = ("name=retried", "strategy=ddp", "proof.reference=false", *SMALL)
    assert harness("timeout_seconds=0.1", *run).returncode == 1
    repeated = harness("retry=error,oom", *run)
    assert repeated.returncode == 1 and "is recorded as timeout; retry=timeout runs it again" in repeated.stderr
    again = harness("retry=error,timeout", *run)
    assert again.returncode == 0 and "is run again, it ended as timeout" in again.stderr
    assert harness("retry=never", *run).stderr.startswith("retry=never is not known: choose error, timeout, oom")


@pytest.mark.long
def test_a_command_continues_after_a_spent_budget(harness: Harness, tmp_path: Path) -> None:
    sweep = ("-m", "name=spent", "strategy=ddp,tp", "proof.reference=false", *SMALL)
    for runs, message in ((1, "stop_after=1runs is reached with 1 run left: the same command continues"), (2, "")):
        done = harness("stop_after=1runs", *sweep)  # what is on file costs nothing
        assert done.returncode == 0 and message in done.stderr
        assert list(read_rows(tmp_path / "results", "spent").status) == ["ok"] * runs


@pytest.mark.long
def test_runs_side_by_side_share_no_core(harness: Harness, tmp_path: Path) -> None:
    sweep = ("-m", "name=beside", "strategy=single", "train.seed=0,1,2", "proof.reference=false", *SMALL)
    done = harness("sweep.parallel=2", "train.steps=30", *sweep)
    assert done.returncode == 0, done.stderr
    spans = []
    for record in read_all(tmp_path / "results" / "beside").records:
        start, (core,) = datetime.fromisoformat(record.row["started_at"]).timestamp(), record.rank_entries[0]["cores"]
        spans.append((start, start + record.row["duration_seconds"], core))
    pairs = itertools.combinations(spans, 2)
    overlapping = [(one[2], two[2]) for one, two in pairs if one[0] < two[1] and two[0] < one[1]]
    assert len(spans) == 3 and overlapping  # two did run at the same time
    assert all(core != other for core, other in overlapping)
    too_many = harness("sweep.parallel=99", *sweep)
    assert "sweep.parallel=99 is more than the" in read_rows(tmp_path / "results", "beside").reason.dropna().iloc[-1]
    assert too_many.returncode == 1  # all are refused for one reason


@given(
    worlds=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=12), parallel=st.sampled_from(["auto", 2, 5])
)
def test_a_device_belongs_to_one_run_at_a_time(worlds: list[int], parallel: int | str) -> None:
    """The machine has eight devices, and its sixteen cores are divided with them."""
    slots = ParallelExecutor(parallel, [], ProgressDisplay())
    cores = tuple((2 * index, 2 * index + 1) for index in range(8))
    slots.placement = DevicePlacement(tuple("01234567"), cores)
    for world in worlds:
        queue_item: Any = SimpleNamespace(planned=SimpleNamespace(devices=world))
        free = slots.free_places(queue_item)
        used = [place for slot in slots.slots for place in slot.places]
        if free:
            assert len(free) == world and not {*free} & {*used}
            slots.slots.append(WorkerSlot(None, None, queue_item, free))  # type: ignore[arg-type]
        else:
            assert len(used) + world > 8 or len(slots.slots) == parallel
    slots.slots.clear()
    slots.close()


def wait_for_input(pipe: Connection) -> None:
    pipe.poll(60)


def test_a_dead_idle_process_is_dropped_and_a_dead_forkserver_replaced() -> None:
    slots, context = ParallelExecutor(2, [], ProgressDisplay()), multiprocessing.get_context("forkserver")
    own_end, other_end = context.Pipe()
    process = context.Process(target=wait_for_input, args=(other_end,))
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (server, signal.SIGKILL)).start()  # it has been asked, and has not answered
    start_process(process)
    other_end.close()
    idle = WorkerSlot(process, own_end)
    slots.slots.append(idle)
    process.kill()
    process.join()
    assert not slots.send_work(idle, ()) and slots.slots == []
    slots.close()


def test_status_shows_a_running_and_a_killed_sweep(tmp_path: Path) -> None:
    sweep = ("-m", "name=seen", "strategy=ddp,tp", "proof.reference=false", "train.seq_len=32", "train.steps=400")
    command = [sys.executable, "-m", "harness", *sweep, f"results_dir={tmp_path}", "tracking=none"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        run_dir = wait_for_step(tmp_path, "seen")
        comparison = ComparisonFolder(run_dir.parent)
        lines = list(status.status_lines(comparison))
        assert lines[0].endswith("no run is recorded, 1 running")
        assert lines[1].startswith(f"  {run_dir.name}: ") and " of 406, " in lines[1] and "MiB on its" in lines[1]
        assert f"command {process.pid} on " in lines[2] and "is running: 0 of 2 runs" in lines[2]
    finally:
        process.kill()
        process.wait()
    lines = list(status.status_lines(comparison))
    assert lines[0].endswith(": 1 interrupted")
    assert "has exited: 0 of 2 runs are recorded; the same command continues with the others" in lines[1]


@pytest.mark.parametrize(
    ("done", "left", "parallel", "seconds"),
    [
        ([], [1.0], 1, None),
        ([(1, 5)], [], 1, 0),
        ([(1, 5), (1, 7)], [1, 1, 9], 1, 18),
        ([(1e9, 5), (3e9, 9)], [5e9, 7e9], 1, 13 + 17),
        ([(1e9, 5), (3e9, 9)], [5e9, 7e9], 2, 15),
        ([(1, 9), (3, 5)], [5], 1, 7),  # never less for more
    ],
)
def test_the_remaining_time_is_extrapolated_from_finished_runs(
    done: list[tuple[float, float]], left: list[float], parallel: int, seconds: float | None
) -> None:
    assert command_file.seconds_left(done, left, parallel) == pytest.approx(seconds)
    assert [format_duration(each) for each in (40, 720, 12600)] == ["40 s", "12 min", "3.5 h"]


def test_several_nodes_need_a_cluster() -> None:
    with pytest.raises(UserError, match=r"cluster.nodes=2 is more than this machine"):
        SequentialExecutor([], ProgressDisplay()).plan_run(compose_config("cluster.nodes=2").to_dict(), 0)
