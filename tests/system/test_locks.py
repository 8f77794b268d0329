"""Commands that share a folder on a file system that locks files, and on one that does not, such as Lustre may be."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.records.run_folder import ComparisonFolder
from harness.sweep.command_file import register_command
from tests.support.commands import long, read_rows
from tests.support.processes import ROOT, run_python, start
from tests.support.slurm_cluster import wait_for, wait_for_step

UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK)

ANY_FOLDER = [None, *UNSUPPORTED]  # None: a folder whose files can be locked

NAMES = ["flock", *map(errno.errorcode.__getitem__, UNSUPPORTED)]

# Acquires a lock, says so, and keeps it until it gets a line.
HOLDER = """
import sys
from pathlib import Path
from harness.util.locks import file_lock
with file_lock(Path(sys.argv[1]), wait=False) as is_acquired:
    print(is_acquired, flush=True)
    sys.stdin.readline()
"""

# Increases a number in a file, many times, each time under the lock.
COUNTER = """
import sys
from pathlib import Path
from harness.util.locks import file_lock
number = Path(sys.argv[1])
for _ in range(40):
    with file_lock(number.with_suffix(".lock")):
        before = int(number.read_text())
        number.write_text(f"{before + 1:09d}")
"""

LOOK = """
import sys
from pathlib import Path
from harness.util.locks import is_locked
print(is_locked(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux":
        pytest.skip("flock is put elsewhere by the dynamic linker of Linux")
    path = tmp_path_factory.mktemp("library") / "no_flock.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, ROOT / "tests/support/no_flock.c", "-ldl"], check=True)
    return path


@pytest.fixture(params=ANY_FOLDER, ids=NAMES)
def variables(request: pytest.FixtureRequest, library: Path, tmp_path: Path) -> Mapping[str, str]:
    """Return what a process has in its environment in whose folder flock fails in this way."""
    if request.param is None:
        return {}
    return {"LD_PRELOAD": str(library), "NO_FLOCK_FOLDER": str(tmp_path), "NO_FLOCK_ERRNO": str(request.param)}


def hold(lock: Path, variables: Mapping[str, str]) -> "tuple[subprocess.Popen[str], bool]":
    """Start a process that tries to acquire the lock; return it, and whether it did."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline() == "True\n"  # type: ignore[union-attr]


def is_locked(lock: Path, variables: Mapping[str, str]) -> bool:
    return run_python(lock.parent, "-c", LOOK, str(lock), **variables).stdout == "True\n"


def test_a_lock_is_that_of_one_living_process(tmp_path: Path, variables: Mapping[str, str]) -> None:
    lock = tmp_path / "run.lock"
    first, is_acquired = hold(lock, variables)
    assert is_acquired and is_locked(lock, variables)
    second, is_acquired_twice = hold(lock, variables)
    second.communicate("\n")
    assert not is_acquired_twice and is_locked(lock, variables)
    first.kill()
    first.communicate()
    assert not is_locked(lock, variables)
    third, is_acquired = hold(lock, variables)
    third.communicate("\n")
    assert is_acquired and not is_locked(lock, variables)
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_the_lease_of_another_machine_is_valid_as_long_as_it_is_renewed(tmp_path: Path, library: Path) -> None:
    variables = {"LD_PRELOAD": str(library), "NO_FLOCK_FOLDER": str(tmp_path), "NO_FLOCK_ERRNO": str(errno.ENOSYS)}
    lock = tmp_path / "run.lock"
    lock.touch()
    lease = tmp_path / "run.lock.other.node-1.4000000.abcd"
    lease.touch()
    process, is_acquired = hold(lock, variables)
    process.communicate("\n")
    assert not is_acquired and is_locked(lock, variables)
    os.utime(lease, (time.time() - 100, time.time() - 100))
    assert not is_locked(lock, variables)
    process, is_acquired = hold(lock, variables)
    assert is_acquired and not lease.exists()
    (own,) = tmp_path.glob("run.lock.*")
    os.utime(own, (0, 0))
    wait_for(lambda: time.time() - own.stat().st_mtime < 20, 20, "the lease is renewed")
    process.communicate("\n")


def test_no_two_processes_are_inside_a_lock(tmp_path: Path, variables: Mapping[str, str]) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    processes = [subprocess.Popen([sys.executable, "-c", COUNTER, number], env=environment) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert int(number.read_text()) == 160


@pytest.mark.parametrize("number", [UNSUPPORTED[0], *map(long, UNSUPPORTED[1:])], ids=NAMES[1:])
def test_status_and_the_next_command_know_who_lives(tmp_path: Path, library: Path, number: int) -> None:
    """A killed command, whose lock nobody releases, does not keep the next one from its run."""
    variables = {"LD_PRELOAD": str(library), "NO_FLOCK_FOLDER": str(tmp_path), "NO_FLOCK_ERRNO": str(number)}

    def status() -> str:
        return run_python(tmp_path, "-m", "harness", "status", str(tmp_path / "sweep"), **variables).stdout

    arguments = ("strategy=single", "proof.reference=false", "train.steps=40")
    command = start(tmp_path, arguments, variables)
    folder = wait_for_step(tmp_path, "sweep", 1)
    os.killpg(command.process.pid, signal.SIGSTOP)
    assert "1 running" in status() and "is running: 0 of 1" in status()
    os.killpg(command.process.pid, signal.SIGKILL)
    command.wait()
    assert "has exited: 0 of 1" in status()
    again = start(tmp_path, arguments, variables)
    assert again.wait() == 0, again.output()
    assert "is being run by another command" not in again.output()
    assert list(read_rows(tmp_path, "sweep").status) == ["ok"]
    assert [path.name for path in (tmp_path / "sweep" / ".locks").iterdir()] == [f"{folder.name}.lock"]


def test_a_command_that_was_killed_while_it_wrote_its_queue_leaves_nothing(tmp_path: Path) -> None:
    comparison = ComparisonFolder(tmp_path)
    with register_command(comparison, (), 1):
        (alive,) = comparison.commands()
        for name in (".command-dead.json.1.ab.tmp", "command-dead.lock", f".{alive}.json.2.cd.tmp"):
            (comparison.locks / name).touch()
        with register_command(comparison, (), 1):
            assert alive in comparison.commands() and len(comparison.commands()) == 2
            assert not [*comparison.locks.glob("*dead*")]
    assert [*comparison.locks.iterdir()] == []
