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

from harness.records import heartbeat
from harness.records.store import read_all
from harness.util.disk_reserve import RESERVE_BYTES, release, reserve
from tests.support.commands import run_harness
from tests.support.folder_invariants import differences, litter
from tests.support.processes import TINY, start

DISK_BYTES = 16 * 2**20

SWEEP = ("-m", "name=sweep", "strategy=ddp,tp", "proof.reference=false", "retry=error", *TINY)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    assert run_harness(folder, *SWEEP).returncode == 0
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root to be mounted")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    """Fill the disk to its last byte."""
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**16, 2**10, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def while_running(results: Path, do: Callable[[], None]) -> threading.Thread:
    """Call this function as soon as a rank trains."""

    def wait() -> None:
        ends_at = time.monotonic() + 120
        while time.monotonic() < ends_at:
            runs = [path.parents[1] for path in results.glob("sweep/*/ranks/*.pulse")]
            if any((beat := heartbeat.read_heartbeat(one, 0)) and beat.phase == "warm-up" for one in runs):
                return do()
            time.sleep(0.005)
        return None

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.long
def test_a_disk_that_fills_during_a_run(small_disk: Path, calm: Path) -> None:
    """The run is an error row, the sweep stops, and no file is half-written; then the same command completes."""
    filling = while_running(small_disk, lambda: fill(small_disk))
    ended = run_harness(small_disk, *SWEEP, "sweep.skip_dominated=false")
    filling.join()
    assert ended.returncode == 1, (ended.stdout, ended.stderr)
    assert (
        f"no disk space is left in {small_disk / 'sweep'}: 1 runs are not started; the same command continues with them"
        in ended.stderr
    )
    found = read_all(small_disk / "sweep")
    ((row,), problems) = ([record.row for record in found.records], found.problems)
    assert (row["status"], problems) == ("error", []) and "No space left on device" in row["reason"]
    assert litter(small_disk) == []
    again = run_harness(small_disk, *SWEEP)
    assert again.returncode in (1, 2) and again.stderr.count("\n") < 8
    (small_disk / "filler").unlink()
    assert run_harness(small_disk, *SWEEP).returncode == 0
    assert differences(small_disk, calm) == []


def test_a_disk_that_is_full_before_is_one_line(small_disk: Path) -> None:
    fill(small_disk)
    ended = run_harness(small_disk, *SWEEP)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "cannot be written (No space left on device): choose another folder" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_room_kept_back_is_taken_whole_or_not_at_all(small_disk: Path) -> None:
    (small_disk / "some").write_bytes(bytes(DISK_BYTES - RESERVE_BYTES // 2))
    held = small_disk / ".reserve"
    with pytest.raises(OSError):
        reserve(held)
    assert not held.exists()
    (small_disk / "some").unlink()
    reserve(held)
    assert held.stat().st_size == RESERVE_BYTES
    assert release(held) and not release(held)


# Root may write everywhere; without these capabilities it is bound by a folder's permissions, as any other user is.
AS_ANYBODY = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""

BOUND = (sys.executable, "-c", AS_ANYBODY)


def allow(folder: Path, mode: int) -> None:
    for path, _, _ in os.walk(folder):
        Path(path).chmod(mode)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="root's power to write everywhere is dropped by prctl")


@needs_linux
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir(mode=0o555)
    refused = start(tmp_path, SWEEP[2:], before=BOUND)
    assert refused.wait() == 2
    rule = "cannot be written (Permission denied): choose another folder"
    assert refused.said().splitlines() == [f"results_dir: {tmp_path / 'sweep'} {rule}"]


@pytest.mark.long
@needs_linux
def test_a_folder_made_read_only_during_a_sweep_is_one_line(tmp_path: Path, calm: Path) -> None:
    command = start(tmp_path, SWEEP[2:], before=BOUND)
    while_running(tmp_path, lambda: allow(tmp_path / "sweep", 0o555)).join()
    status, last = command.wait(), command.said().splitlines()[-1]
    assert status == 2 and "Traceback" not in command.said(), command.said()
    assert "Permission denied" in last and str(tmp_path / "sweep") in last
    allow(tmp_path / "sweep", 0o755)
    assert run_harness(tmp_path, *SWEEP).returncode == 0
    assert differences(tmp_path, calm) == [] == litter(tmp_path)
