"""Every end of a run is a row that states how and where it ended and what its ranks held then."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.launcher.launch import oom_kill_count
from harness.launcher.monitor import HangDetector
from harness.launcher.rank_entry import main_thread_location
from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from tests.support import commands, faults
from tests.support.commands import ROOT, Entry, run_folder, run_with

CGROUP = Path("/sys/fs/cgroup/memory")  # of version 1; of version 2 a process must not have siblings in its group

LIMIT_BYTES = 3 * 2**30


@pytest.fixture(scope="module")
def results(results: Path) -> Path:
    """Return one folder for all runs, with the reference in it, so that no later start is slow and limits are short."""
    assert run_with(results, "strategy=ddp").row["status"] == "ok"
    return results


@pytest.mark.parametrize(("fault", "strategy"), [(faults.exhausted, "ddp"), (faults.exhausted_in_a_stage, "pp_1f1b")])
def test_running_out_of_memory_is_an_oom_row(results: Path, fault: Entry, strategy: str) -> None:
    row = run_with(results, f"strategy={strategy}", entry=fault).row
    assert row["status"] == "oom" and row["failed_in_phase"] == "warm-up"
    assert "rank 1 ran out of memory in phase warm-up" in row["reason"]
    check_last(row)


def check_last(row: dict[str, object]) -> None:
    """Check that a rank held more than half of a pipeline's weights at the end, in a process of torch's size."""
    assert 2 * int(row["parameters"]) < row["last_seen_allocated_bytes"] < 2**30  # type: ignore[call-overload,operator]
    assert 2**26 < row["last_seen_rss_bytes"] < 2**34  # type: ignore[operator]
    assert row.get("peak_allocated_bytes") is None  # of no timed steps


def test_a_killed_rank_is_named(results: Path) -> None:
    row = run_with(results, "strategy=ddp", entry=faults.killed).row
    assert row["status"] == "error"
    assert "rank 1" in row["reason"] and "SIGKILL" in row["reason"]


def test_an_error_that_quotes_a_secret_is_told_without_it(results: Path) -> None:
    """Neither the record nor the ranks' reports, logs and other files have it."""
    record = run_with(results, "strategy=ddp", entry=faults.leaking)
    assert record.row["status"] == "error" and "401 from https://[secret]@host" in record.row["reason"]
    files = {path.name: path.read_bytes() for path in run_folder(results, record).path.rglob("*") if path.is_file()}
    assert {"record.json", "rank_00000.json", "rank_0.log"} <= files.keys()
    assert not [name for name, content in files.items() if b"hf_aB3" in content]


def test_a_time_limit_is_a_timeout_that_names_the_late_ranks(results: Path) -> None:
    row = run_with(results, "strategy=ddp", "timeout_seconds=8", entry=faults.stuck).row
    assert row["status"] == "timeout" and "killed at its time limit, after " in row["reason"]
    assert "; unfinished: rank 0, 1; rank 1 had sent no heartbeat" in row["reason"]


def test_a_hang_ends_early_and_leaves_every_ranks_stacks(results: Path) -> None:
    record = run_with(results, "strategy=ddp", "hang_seconds=3", entry=faults.stuck_in_a_step)
    row = record.row
    assert (row["status"], row["failed_in_phase"]) == ("timeout", "warm-up")
    assert row["reason"].startswith("killed after 3 s without progress of any rank; unfinished: rank 0, 1; rank ")
    assert "was in warm-up, step 1, in " in row["reason"] and row["duration_seconds"] < 15
    check_last(row)
    folder = folder_of(results, record)
    assert (main_thread_location(folder, 1) or "").startswith("stuck_in_a_step (endings.py:")
    assert "harness/worker/train_loop.py" in RunFolder(folder).stacks(0).read_text()


def folder_of(results: Path, record: Record) -> Path:
    return results / commands.COMPARISON / record.run_id


@pytest.mark.long
def test_a_slow_run_is_not_a_hang(results: Path) -> None:
    """The limit may be short compared with the whole run, as long as no step takes that long."""
    record = run_with(results, "strategy=ddp", "hang_seconds=6", entry=faults.slow_steps)
    assert record.row["status"] == "ok" and record.row["duration_seconds"] > 6
    assert record.row.get("failed_in_phase") is None
    assert not list(folder_of(results, record).glob("logs/stacks*"))


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Yield a control group with little memory."""
    group = CGROUP / f"harness_{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    patience = time.monotonic() + 10
    while group.exists() and time.monotonic() < patience:
        with suppress(OSError):  # its last processes are on their way out
            group.rmdir()


IN_GROUP = """
import os, sys
from pathlib import Path
if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    from tests.support import commands, faults
    row = commands.run_with(Path(sys.argv[2]), "strategy=ddp", "proof.reference=false", entry=faults.greedy).row
    print(row["status"], row["failed_in_phase"], row["reason"])
"""


def test_a_kill_by_the_kernel_for_memory_is_an_oom(tmp_path: Path, small_group: Path) -> None:
    """The run has a control group of its own, so that the kernel really kills it."""
    command = [sys.executable, "-c", IN_GROUP, str(small_group), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("oom warm-up rank 1 was killed by the kernel because memory ran out"), done


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"self/cgroup": "0::/a/b", "cgroups/a/b/memory.events": "oom 7\noom_kill 3", "vmstat": "oom_kill 9"}, 3),
        ({"self/cgroup": "4:memory:/c\n0::/", "cgroups/memory/c/memory.oom_control": "under_oom 0\noom_kill 2"}, 2),
        ({"self/cgroup": "0::/gone", "vmstat": "nr_free 4\noom_kill 9"}, 9),
        ({}, 0),
    ],
)
def test_oom_kills_are_counted_in_the_process_group(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kill_count(tmp_path, tmp_path / "cgroups") == kills


def test_any_heartbeat_is_progress(tmp_path: Path) -> None:
    """A profiled step of many micro-batches has the same phase, step and memory again and again."""
    writer, folder = HeartbeatWriter(tmp_path, 0), RunFolder(tmp_path)
    folder.ranks.mkdir()
    detector = HangDetector(lambda: folder.read_heartbeat(0), seconds=10)
    start = time.monotonic()
    for second in range(30):
        writer("profiled", 7)
        assert not detector.is_hanging(start + second)
    assert detector.is_hanging(start + 40)


def test_a_heartbeat_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    assert RunFolder(tmp_path).read_heartbeat(0) is None
    writer = HeartbeatWriter(tmp_path, 0)
    writer("a rather long phase", 123)
    assert RunFolder(tmp_path).read_heartbeat(0) == ("a rather long phase", 123, None, writer.last.host_bytes, 1)
    writer("short")
    assert (RunFolder(tmp_path).read_heartbeat(0) or writer.last).phase == "short"
    RunFolder(tmp_path).heartbeat(0).write_text('["cut')
    assert RunFolder(tmp_path).read_heartbeat(0) is None
