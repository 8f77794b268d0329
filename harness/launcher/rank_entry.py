"""The code that every rank runs before the worker's: its lifeline, its log, and its messages to the parent.

Stack traces of a rank's threads are written on demand by its signal handler, whatever its code is doing.
"""

import faulthandler
import importlib
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from harness.launcher.signals import is_ignored
from harness.records.run_folder import RunFolder
from harness.util.text import one_line

# A rank that raised waits this long before it exits, because its peers' connections break only then. The agent checks
# every 0.05 s and reports the first exit it sees, so a rank that was killed is reported before ranks that raised
# because they lost the connection to it.
LINGER_SECONDS = 0.4

DUMP_SECONDS = 0.5  # time for the handlers to write stack traces

MAIN_PATTERN = ("harness/launcher/rank_entry.py", "run_rank")  # file and function on every rank's main thread


@dataclass(frozen=True)
class Raised:
    """The exception that a rank's code raised, SystemExit included."""

    moment: float  # time.monotonic(): one clock for all processes of a machine
    error: str
    exit_code: int


# What a rank tells its parent: its process id when it has started, then None when it has finished, or what it raised.
Message = int | Raised | None


def run_rank(
    module: str,
    function: str,
    run_dir: Path,
    cores: Sequence[int],
    lifeline: Connection,
    reports: Sequence[Connection],
) -> None:
    """Run `module.function(str(run_dir))` as this rank, on these cores.

    `lifeline` closes when the parent dies or ends the run; `reports` are the connections of all local ranks to the
    parent.
    """
    threading.Thread(target=die_with, args=(lifeline, RunFolder(run_dir).checkpoint), daemon=True).start()
    if hasattr(os, "sched_setaffinity"):  # the process that forked this one may use other cores
        os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group, and the parent handles it
    for number in (signal.SIGTERM, signal.SIGHUP):
        if not is_ignored(number):
            signal.signal(number, signal.SIG_DFL)  # die at once, whatever handler was inherited
    report = reports[int(os.environ["LOCAL_RANK"])]
    for other in reports:
        if other is not report:
            other.close()
    _redirect(RunFolder(run_dir).log(int(os.environ["RANK"])))
    enable_dump(run_dir, int(os.environ["RANK"]))
    _report(report, os.getpid())
    try:
        getattr(importlib.import_module(module), function)(str(run_dir))
    except BaseException as error:
        moment = time.monotonic()
        code = _exit_code(error)
        if code != 0:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            _report(report, Raised(moment, one_line(traceback.format_exception_only(error)[-1]), code))
            time.sleep(LINGER_SECONDS)
            os._exit(code)  # skip the interpreter's shutdown, in which an open process group can abort or hang
    _report(report, None)


def worker_entry(run_dir: str) -> None:
    """Run the worker. It is imported only here, in a rank, because the parent does not need the worker's imports."""
    importlib.import_module("harness.worker.main").main(run_dir)


def die_with(end: Connection | int, folder: Path | None = None) -> None:
    """Kill this process when the other end of a pipe closes, or the process of a sentinel ends.

    The folder is removed before, as nobody else is there to do it.
    """
    wait([end])
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _redirect(target: Path) -> None:
    """Redirect standard output and error to a file, for C++ code too. torch's redirection does not exist on macOS."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _report(report: Connection, message: Message) -> None:
    with suppress(OSError):  # the parent is dead, and this rank will be killed in a moment
        report.send(message)


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF or int(error.code != 0)
    return int(error.code is not None)


def enable_dump(run_dir: Path, rank: int) -> None:
    """Make SIGUSR1 write this rank's stack traces. The handler is in C and works while the interpreter is blocked."""
    file = RunFolder(run_dir).stacks(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def request_dumps(pids: Iterable[int]) -> None:
    """Make these ranks, which have called enable_dump(), write their stack traces."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)


def remove_empty(run_dir: Path, ranks: Iterable[int]) -> None:
    """Remove the files of ranks that wrote no stack trace."""
    for path in (RunFolder(run_dir).stacks(rank) for rank in ranks):
        if path.exists() and not path.stat().st_size:
            path.unlink()


def main_thread_location(run_dir: Path, rank: int) -> str | None:
    """Return the function, file and line that a rank's main thread was in, or None if its stack trace is missing."""
    path = RunFolder(run_dir).stacks(rank)
    for thread in path.read_text(errors="replace").split("\n\n") if path.exists() else ():
        frames = re.findall(r'^  File "(.*)", line (\S+) in (.*)$', thread, re.MULTILINE)  # faulthandler's format
        if any(file.endswith(MAIN_PATTERN[0]) and function == MAIN_PATTERN[1] for file, _, function in frames):
            file, line, function = frames[0]
            return f"{function} ({Path(file).name}:{line})"
    return None
