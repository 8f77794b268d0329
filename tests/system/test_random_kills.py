"""Disturbed sweeps come to the table of an undisturbed one.

More kills are made by python -m tests.support.random_kills.
"""

import functools
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.records.schema import Row
from harness.records.store import read_all
from harness.runner.launch_run import RunContext
from harness.sweep import scheduler
from tests.support import faults, random_kills
from tests.support.commands import Harness, run_harness, run_with
from tests.support.folder_invariants import Ledger, differences, litter
from tests.support.processes import TINY

KILLS = 4

SHORT = random_kills.Way(
    "short",
    (*random_kills.AGAIN, "strategy=ddp,tp"),
    random_kills.PARENTS | random_kills.RANKS,
    commands=2,
    longest_seconds=5,
)


@pytest.mark.long
def test_a_killed_sweep_comes_to_the_undisturbed_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Any process may be killed, also of two commands that make one sweep."""
    calm, tally, chance = random_kills.undisturbed(SHORT, tmp_path / "calm"), random_kills.Tally(), random.Random(0)
    while tally.kills.total() < KILLS:
        left = KILLS - tally.kills.total()
        random_kills.disturbed(SHORT, calm, tmp_path / str(tally.folders), chance, tally, left)
    with capfd.disabled():
        print()
        random_kills.report(tally, 0)
    assert not tally.violations


def test_the_invariants_detect_every_bad_end(tmp_path: Path) -> None:
    """The invariants detect a touched finished record, half a record, a table that differs, and files left behind."""
    sweep = ("-m", "name=sweep", "strategy=single", "proof.reference=false", *TINY)
    assert run_harness(tmp_path / "calm", *sweep).returncode == 0
    shutil.copytree(tmp_path / "calm", tmp_path / "other")
    assert differences(tmp_path / "other", tmp_path / "calm") == [] == litter(tmp_path / "other")
    ledger = Ledger(tmp_path / "other")
    assert ledger.look() == []
    (path,) = (tmp_path / "other" / "sweep").glob("single*/record.json")
    text = path.read_text()
    path.write_text(text.replace('"loss_first": 5', '"loss_first": 6'))
    (path.parent / ".record.json.1.tmp").touch()
    assert ledger.look() == [f"a finished record was touched: {path.parent.name}"]
    assert "loss_first is 6" in differences(tmp_path / "other", tmp_path / "calm")[0]
    assert len(litter(tmp_path / "other")) == 1
    path.write_text(text[:100])
    assert ledger.look()[0].startswith("half a record")
    path.unlink()
    assert "is gone" in ledger.look()[0]
    assert "has no row" in differences(tmp_path / "other", tmp_path / "calm")[0]


def rows_by_strategy(results: Path) -> dict[str, Row]:
    return {record.row["strategy"]: record.row for record in read_all(results / "sweep").records}


@pytest.mark.long
def test_every_failure_of_a_sweep_is_a_row_and_is_run_again(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ("-m", "name=sweep", "strategy=ddp,fsdp_full_shard,tp,single", *TINY, "train.warmup_steps=2")
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "RunContext", functools.partial(RunContext, faults.each_its_own))
        assert harness(*sweep, "hang_seconds=30").returncode == 1
    rows = rows_by_strategy(tmp_path / "results")
    failures = {name: (row["status"], row["failed_in_phase"]) for name, row in rows.items() if row["status"] != "ok"}
    assert failures == {"ddp": ("oom", "warm-up"), "fsdp_full_shard": ("timeout", "warm-up"), "tp": ("error", "timed")}
    assert "the loss is not finite from step 2 on, in timed" in rows["tp"]["reason"]
    assert all(row["last_seen_rss_bytes"] > 2**26 for row in rows.values() if row["status"] != "ok")
    assert harness(*sweep, "retry=error,timeout,oom").returncode == 0
    assert run_harness(tmp_path / "calm", *sweep).returncode == 0
    assert differences(tmp_path / "results", tmp_path / "calm") == []


def test_a_collective_that_fails_is_an_error_row(tmp_path: Path) -> None:
    row = run_with(tmp_path, "strategy=ddp", "proof.reference=false", entry=faults.collective_mismatched).row
    assert (row["status"], row["failed_in_phase"]) == ("error", "warm-up")
    assert "is there a distributed collective mismatch" in row["reason"].lower() and "\n" not in row["reason"]


@contextmanager
def jumping_clock(offset: Path) -> Iterator[None]:
    """Set a clock file hours forward and back, again and again."""
    over = threading.Event()

    def jump() -> None:
        chance = random.Random(3)
        while not over.wait(0.2):
            offset.write_text(str(chance.randint(-36000, 36000)))

    thread = threading.Thread(target=jump)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long
def test_a_clock_that_jumps_disturbs_nothing(tmp_path: Path) -> None:
    """Neither time limits nor measurements depend on the time of day."""
    if sys.platform != "linux":
        pytest.skip("the clock is put elsewhere by the dynamic linker of Linux")
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    source = Path(__file__).parents[1] / "support" / "clock.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    shifted = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
    started = time.monotonic()
    with jumping_clock(offset):
        status, output = random_kills.run_to_end(
            tmp_path, "strategy=ddp,tp", "proof.reference=false", "hang_seconds=60", environment=shifted
        )
    seconds = time.monotonic() - started
    assert status == 0, output
    days = set()
    for row in rows_by_strategy(tmp_path).values():
        parts = [value for column, value in row.items() if column.endswith("_seconds") and value is not None]
        assert all(0 <= part < seconds for part in [row["duration_seconds"], row["step_seconds"], *parts]), row
        days.add(row["started_at"][:13])
    assert len(days) > 1  # the clock did jump
