"""A disk that is full or read-only leaves rows and one clear message; with room again the same command completes."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.records.run_folder import RunFolder
from harness.records.store import read_all
from harness.util.files import MIN_FREE_BYTES, RESERVE_BYTES, release, reserve
from tests.support.commands import long, run_harness
from tests.support.folder_invariants import differences, litter
from tests.support.processes import TINY, start

DISK_BYTES = 16 * 2**20

SWEEP = (
    "-m",
    "name=sweep",
    "strategy=ddp,tp",
    "model.num_hidden_layers=2",
    "proof.reference=false",
    "retry=error",
    *TINY,
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    assert run_harness(folder, *SWEEP).returncode == 0
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(mountpoint)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root to be mounted")
    yield mountpoint
    subprocess.run(["umount", "--lazy", str(mountpoint)], check=True)


def fill(disk: Path) -> None:
    """Fill the disk to its last byte."""
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(bytes(DISK_BYTES))


def call_while_running(results: Path, action: Callable[[], None]) -> threading.Thread:
    """Call this function as soon as a rank trains."""

    def wait() -> None:
        ends_at = time.monotonic() + 120
        while time.monotonic() < ends_at:
            runs = [path.parents[1] for path in results.glob("sweep/*/ranks/*.pulse")]
            if any((beat := RunFolder(run).read_heartbeat(0)) and beat.phase == "warm-up" for run in runs):
                return action()
            time.sleep(0.005)
        return None

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.long
def test_a_disk_that_fills_during_a_run_is_an_error_row(small_disk: Path, calm: Path) -> None:
    """The run is an error row, the sweep stops, and no file is half-written; then the same command completes."""
    filling = call_while_running(small_disk, lambda: fill(small_disk))
    ended = run_harness(small_disk, *SWEEP, "sweep.skip_dominated=false")
    filling.join()
    assert ended.returncode == 1, (ended.stdout, ended.stderr)
    assert (
        f"no disk space is left in {small_disk / 'sweep'} with 1 run left: the same command continues" in ended.stderr
    )
    stored = read_all(small_disk / "sweep")
    ((row,), problems) = ([record.row for record in stored.records], stored.problems)
    assert (row["status"], problems) == ("error", []) and "No space left on device" in row["reason"]
    assert litter(small_disk) == []
    again = run_harness(small_disk, *SWEEP)
    assert again.returncode in (1, 2) and again.stderr.count("\n") < 8
    (small_disk / "filler").unlink()
    assert run_harness(small_disk, *SWEEP).returncode == 0
    assert differences(small_disk, calm) == []


def test_a_disk_that_is_full_at_the_start_prints_one_line(small_disk: Path) -> None:
    fill(small_disk)
    ended = run_harness(small_disk, *SWEEP)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "cannot be written (No space left on device): choose another folder" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_disk_without_room_for_a_run_is_no_success(small_disk: Path) -> None:
    (small_disk / "some").write_bytes(bytes(DISK_BYTES - MIN_FREE_BYTES))
    ended = run_harness(small_disk, *SWEEP)
    assert (ended.returncode, ended.stdout) == (1, "")
    place = small_disk / "sweep"
    assert ended.stderr == f"no disk space is left in {place} with 2 runs left: the same command continues\n"


@pytest.mark.parametrize("setting", ["train.seed=1", long("train.micro_batch=max"), long("sweep.parallel=2")])
def test_a_refusal_of_the_machine_is_no_success_and_leaves_with_the_run(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a place for the corpus nothing runs, for a reason that is said once; then each combination has one row.

    None of the three is refused under the id that its run has later.
    """
    sweep = (*SWEEP, setting, "train.global_batch=2")
    with monkeypatch.context() as patched:
        patched.setenv("HOME", "/proc/none")
        refused = run_harness(tmp_path, *sweep)
    assert refused.returncode == 1
    reason = "ddp, tp refused: data.cache=/proc/none/.cache/harness cannot be written"
    assert reason in refused.stdout and refused.stdout.count("cannot be written") == 1
    assert [record.status for record in read_all(tmp_path / "sweep").records] == ["refused"] * 2
    assert litter(tmp_path) == []
    assert run_harness(tmp_path, *sweep).returncode == 0
    rows = {(record.row["strategy"], record.status) for record in read_all(tmp_path / "sweep").records}
    assert {strategy for strategy, _ in rows} == {"ddp", "tp"} and {status for _, status in rows} == {"ok"}


def test_a_folder_that_moves_during_a_run_is_named(tmp_path: Path) -> None:
    (results := tmp_path / "results").mkdir()
    moving = call_while_running(results, lambda: results.rename(tmp_path / "elsewhere") and None)
    ended = run_harness(results, *SWEEP, "strategy=ddp", "train.steps=40")
    moving.join()
    assert ended.returncode == 1
    (row,) = (record.row for record in read_all(results / "sweep").records)
    assert row["status"] == "error"
    place = results / "sweep" / row["run_id"]
    assert row["reason"] == f"{place} was moved or removed while the ranks ran: run it again"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is replaced in a name space of its own")
def test_shared_memory_without_room_is_named(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4096 none /dev/shm && head -c 4096 /dev/zero > /dev/shm/some && exec "$@"'
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False).returncode != 0:
        pytest.skip("a file system of its own needs root to be mounted")
    ended = start(
        tmp_path, ["strategy=ddp", "proof.reference=false"], before=["unshare", "-m", "sh", "-c", script, "sh"]
    )
    assert ended.wait() == 1
    (record,) = read_all(tmp_path / "sweep").records
    assert record.row["reason"] == (
        "the ranks could not be run: OSError: [Errno 28] No space left on device for a semaphore in /dev/shm: free"
        " space there; a container gets more with --shm-size=1g"
    )


def test_disk_space_is_reserved_whole_or_not_at_all(small_disk: Path) -> None:
    (small_disk / "some").write_bytes(bytes(DISK_BYTES - RESERVE_BYTES // 2))
    reserve_file = small_disk / ".reserve"
    with pytest.raises(OSError):
        reserve(reserve_file)
    assert not reserve_file.exists()
    (small_disk / "some").unlink()
    reserve(reserve_file)
    assert reserve_file.stat().st_size == RESERVE_BYTES
    release(reserve_file)
    assert not reserve_file.exists()
    release(reserve_file)


# Root may write everywhere; without these capabilities it is bound by a folder's permissions, as any other user is.
DROP_CAPABILITIES = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""

WITHOUT_ROOT_POWERS = (sys.executable, "-c", DROP_CAPABILITIES)


def change_modes(folder: Path, mode: int) -> None:
    for path, _, _ in os.walk(folder):
        Path(path).chmod(mode)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="root's power to write everywhere is dropped by prctl")


@needs_linux
def test_a_read_only_folder_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir(mode=0o555)
    refused = start(tmp_path, SWEEP[2:], before=WITHOUT_ROOT_POWERS)
    assert refused.wait() == 2
    rule = "cannot be written (Permission denied): choose another folder"
    assert refused.output().splitlines() == [f"results_dir: {tmp_path / 'sweep'} {rule}"]


@pytest.mark.long
@needs_linux
def test_a_folder_that_becomes_read_only_during_a_sweep_prints_one_line(tmp_path: Path, calm: Path) -> None:
    command = start(tmp_path, SWEEP[2:], before=WITHOUT_ROOT_POWERS)
    call_while_running(tmp_path, lambda: change_modes(tmp_path / "sweep", 0o555)).join()
    status, last = command.wait(), command.output().splitlines()[-1]
    assert status == 2 and "Traceback" not in command.output(), command.output()
    assert "Permission denied" in last and str(tmp_path / "sweep") in last
    change_modes(tmp_path / "sweep", 0o755)
    assert run_harness(tmp_path, *SWEEP).returncode == 0
    assert differences(tmp_path, calm) == [] == litter(tmp_path)
