"""Runs that end from outside are run again, up to a limit and after a pause; errors of their own are not."""

import functools
import time
from pathlib import Path

import pytest

from harness.records.schema import Row
from harness.records.store import read_all
from harness.runner.launch_run import RunContext
from harness.sweep import scheduler
from tests.support import faults
from tests.support.commands import Entry, Harness, long
from tests.support.processes import TINY, kill_one, random, start
from tests.support.slurm_cluster import wait_for_step

SWEEP = ("-m", "name=sweep", "proof.reference=false", *TINY, "train.warmup_steps=2")

KILLED = "rank 1 was killed by SIGKILL"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function that makes ranks run another entry."""
    return lambda entry: monkeypatch.setattr(scheduler, "RunContext", functools.partial(RunContext, entry))


def rows(results: Path) -> dict[str, Row]:
    return {record.row["strategy"]: record.row for record in read_all(results / "sweep").records}


def test_a_killed_rank_is_run_again_after_the_other_runs(harness: Harness, tmp_path: Path, plant: object) -> None:
    plant(faults.killed_once)  # type: ignore[operator]
    done = harness(*SWEEP, "strategy=ddp,zero1_torch", "retry_pause_seconds=2")
    assert done.returncode == 0, done.stderr
    for row in rows(tmp_path / "results").values():
        assert (row["status"], row["attempts"]) == ("ok", 2) and row["earlier_ends"].startswith(KILLED)
        assert row.get("ended_from_outside") is None
    lines = [line.split(", its log")[0] for line in done.stderr.splitlines()]
    again = [index for index, line in enumerate(lines) if "it is run again in 2 s, 1 of retries=1" in line]
    ended = [index for index, line in enumerate(lines) if ": ok," in line]
    assert len(again) == len(ended) == 2 and max(again) < min(ended), done.stderr


def test_the_limit_holds_within_a_command_and_the_next_one_goes_on(
    harness: Harness, tmp_path: Path, plant: object
) -> None:
    plant(faults.killed)  # type: ignore[operator]
    assert harness(*SWEEP, "strategy=ddp", "retry_pause_seconds=0").returncode == 1
    row = rows(tmp_path / "results")["ddp"]
    assert (row["status"], row["attempts"], row["ended_from_outside"]) == ("error", 2, True)
    assert row["earlier_ends"].count(KILLED) == 1 and row["reason"].startswith(KILLED)
    assert harness(*SWEEP, "strategy=ddp", "retries=0").returncode == 1
    row = rows(tmp_path / "results")["ddp"]
    assert row["attempts"] == 3 and row["earlier_ends"].count(KILLED) == 2


@pytest.mark.parametrize("entry", [faults.nan_later, long(faults.exhausted)])
def test_an_error_of_the_run_is_not_run_again(entry: Entry, harness: Harness, tmp_path: Path, plant: object) -> None:
    plant(entry)  # type: ignore[operator]
    harness(*SWEEP, "strategy=ddp")
    row = rows(tmp_path / "results")["ddp"]
    assert (row["attempts"], row.get("ended_from_outside"), row.get("earlier_ends")) == (1, None, None)
    assert "is recorded" in harness(*SWEEP, "strategy=ddp").stderr


@pytest.mark.long
def test_a_killed_worker_of_parallel_runs_is_replaced(tmp_path: Path) -> None:
    arguments = ("strategy=ddp", "proof.reference=false", "train.steps=30", "sweep.parallel=2", "retry_pause_seconds=1")
    command = start(tmp_path, arguments)
    wait_for_step(tmp_path, "sweep", 1)
    assert kill_one(command, "slot", random.Random(0))
    started = time.monotonic()
    assert command.wait() == 0 and time.monotonic() - started > 1, command.output()
    row = rows(tmp_path)["ddp"]
    assert (row["status"], row["attempts"]) == ("ok", 2)
    assert row["earlier_ends"] == "the process that ran it ended with SIGKILL"
