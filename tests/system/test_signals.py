"""What ends a command from outside: signals that it inherits as ignored, closed terminals and pipes, and low limits."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.commands import long, read_rows
from tests.support.processes import PATIENCE_SECONDS, TINY, Command, run_python, start
from tests.support.slurm_cluster import wait_for, wait_for_step

LONG = ("strategy=ddp", "train.steps=100000", "proof.reference=false")

SWEEP = ("-m", "name=sweep", "strategy=ddp", "proof.reference=false", *TINY, "train.steps=200")

TRAPPED = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")

IGNORING = ("nohup",)

REPORT = {"runs.csv", "report.md", "report.html"}


def written(folder: Path) -> set[str]:
    return {path.name for path in (folder / "sweep").iterdir()} & REPORT


@pytest.mark.parametrize(
    "arguments", [("timeout_seconds=8",), long(("timeout_seconds=8", "sweep.parallel=2"))], ids=str
)
def test_time_limits_hold_where_a_shell_ignores_sigterm(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command = start(tmp_path, (*LONG, *arguments), before=TRAPPED)
    assert command.wait() == 1, command.output()
    (reason,) = read_rows(tmp_path, "sweep").reason
    assert reason.startswith("killed at its time limit, after"), reason


def test_a_command_under_a_shell_that_ignores_sigterm_ends_by_sigterm(tmp_path: Path) -> None:
    command = start(tmp_path, LONG, before=TRAPPED)
    wait_for_step(tmp_path, "sweep", 1)
    command.process.terminate()
    assert command.wait() == 130, command.output()
    (row,) = read_rows(tmp_path, "sweep").itertuples()
    assert row.status == "interrupted" and row.reason.endswith(" s: the same command runs it again")
    assert written(tmp_path) == REPORT


def test_ctrl_c_says_what_goes_on_without_a_traceback(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group, in which a reference has begun to train."""
    command = start(tmp_path, ("strategy=ddp", "train.steps=2000"))
    references = tmp_path / "sweep" / "references"
    wait_for(lambda: any(references.glob("*/ranks/*.pulse")), PATIENCE_SECONDS, "a reference has a heartbeat")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == 128 + signal.SIGINT, command.output()
    (row,), (reference,) = read_rows(tmp_path, "sweep").itertuples(), references.glob("*/record.json")
    assert row.reason == f"stopped during its reference {reference.parent.name}: the same command goes on"
    assert row.status == json.loads(reference.read_bytes())["row"]["status"] == "interrupted"
    assert f"ddp interrupted: {row.reason} Nothing can be taken" in " ".join(command.output().split())
    logs = [path.read_text() for path in reference.parent.glob("logs/*.log")]
    assert logs and "Traceback" not in "".join([command.output(), *logs])
    assert written(tmp_path) == REPORT


def hang_up(command: Command) -> None:
    """Send SIGHUP to the group twice, as a shell and then the kernel do when a terminal is closed."""
    for _ in range(2):
        os.killpg(command.process.pid, signal.SIGHUP)


def test_nohup_protects_ranks_too(tmp_path: Path) -> None:
    command = start(tmp_path, ("strategy=ddp", "proof.reference=false", "train.steps=200"), before=IGNORING)
    wait_for_step(tmp_path, "sweep", 1)
    hang_up(command)
    assert command.wait() == 0, command.output()


def test_a_closed_terminal_leaves_table_and_report(tmp_path: Path) -> None:
    """Its kernel sends SIGHUP, and every write to the terminal fails with EIO."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-m", "harness", *SWEEP, *LONG, f"results_dir={tmp_path}"])
    reader = threading.Thread(target=read_until_closed, args=(terminal,), daemon=True)
    reader.start()
    wait_for_step(tmp_path, "sweep", 1)
    os.kill(child, signal.SIGSTOP)  # nothing is read between the last step and the end
    os.close(terminal)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    assert list(read_rows(tmp_path, "sweep").status) == ["interrupted"] and written(tmp_path) == REPORT


def read_until_closed(descriptor: int) -> None:
    with suppress(OSError):
        while os.read(descriptor, 4096):
            pass


def test_a_closed_pipe_ends_no_sweep(tmp_path: Path) -> None:
    """The reader of both outputs, such as tee, is killed: the runs go on, and the report is written."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "harness", *SWEEP, f"results_dir={tmp_path}"]
    with subprocess.Popen(command, stdout=writing, stderr=writing) as process:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        assert process.wait(PATIENCE_SECONDS) != 0  # for the table, which nobody reads
    assert list(read_rows(tmp_path, "sweep").status) == ["ok"] and written(tmp_path) == REPORT


@pytest.mark.parametrize("parallel", (1, long(2)))
def test_a_low_limit_on_open_files_is_refused_with_one_that_is_enough(tmp_path: Path, parallel: int) -> None:
    arguments = ("strategy=ddp", "proof.reference=false")
    status, output = start_limited(tmp_path / "low", 24, *arguments)
    (reason,) = read_rows(tmp_path / "low", "sweep").reason
    assert reason == (
        "world_size: 2 ranks on this machine need 48 open files, and `ulimit -n` is 24: raise it, with ulimit -n 48"
    ), output
    status, output = start_limited(tmp_path / "enough", 48, *arguments, f"sweep.parallel={parallel}")
    assert status == 0 and list(read_rows(tmp_path / "enough", "sweep").status) == ["ok"], output


def start_limited(folder: Path, files: int, *arguments: str) -> tuple[int, str]:
    command = start(folder, arguments, before=("sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"))
    return command.wait(), command.output()


PROBLEM = """
import os, resource, sys
from harness.launcher.limits import limit_problem
resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
if not os.geteuid():
    os.setuid(61234)
print(limit_problem(1), limit_problem(4), sep="\\n")
"""


def test_a_low_limit_on_processes_is_refused(tmp_path: Path) -> None:
    lines = run_python(tmp_path, "-c", PROBLEM).stdout.splitlines()
    assert lines[-1].startswith("world_size: 4 ranks on this machine need 56 processes and threads, and 40 are allowed")
    assert lines[-1].endswith(": raise the limit, with ulimit -u"), lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_before_anything_is_recorded_leaves_a_line(tmp_path: Path, number: signal.Signals) -> None:
    """The command is still reading its configuration, for which it needs more time than this."""
    command = start(tmp_path, ("strategy=ddp,zero1",))
    while psutil.Process(command.process.pid).cpu_times().user < 0.3:
        time.sleep(0.01)
    command.process.send_signal(number)
    assert command.wait() == -number, command.output()
    assert f"harness: ended by {number.name} before a run was recorded" in command.output()
    assert not (tmp_path / "sweep").exists()
