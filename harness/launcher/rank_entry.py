"""The first lines of every rank, before any of the worker's: its end, its log and what it tells the parent."""

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from harness.launcher import stack_dump
from harness.records.run_folder import RunFolder
from harness.util.text import one_line

# A rank that raised stays this long before it exits. Its peers' connections break only then, and the agent, which
# looks every 0.05 s and names the first exit it finds, sees a killed peer before those that raised in consequence.
LINGER_SECONDS = 0.4


@dataclass(frozen=True)
class Started:
    pid: int


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Raised:
    """What ended a rank from inside."""

    moment: float  # time.monotonic(): one clock for all processes of a machine
    error: str
    exit_code: int


def run_rank(
    module: str,
    function: str,
    run_dir: Path,
    cores: Sequence[int],
    lifeline: Connection,
    reports: Sequence[Connection],
) -> None:
    """Runs `module.function(str(run_dir))` as this rank, on these cores.

    `lifeline` ends when the parent dies or lets go; `reports` are every local rank's way to the parent.
    """
    threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()
    if hasattr(os, "sched_setaffinity"):  # the process that forked it may have others
        os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: no failure of this rank
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # die at once, whatever was inherited
    report = reports[int(os.environ["LOCAL_RANK"])]
    for other in reports:
        if other is not report:
            other.close()
    _redirect(RunFolder(run_dir).log(int(os.environ["RANK"])))
    stack_dump.enable_dump(run_dir, int(os.environ["RANK"]))
    _tell(report, Started(os.getpid()))
    try:
        getattr(importlib.import_module(module), function)(str(run_dir))
    except BaseException as error:
        moment = time.monotonic()
        code = _exit_code(error)
        if code != 0:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            _tell(report, Raised(moment, one_line(traceback.format_exception_only(error)[-1]), code))
            time.sleep(LINGER_SECONDS)
            os._exit(code)  # not through the interpreter's end: a process group left open can abort or hang there
    _tell(report, Done())


def worker_entry(run_dir: str) -> None:
    """What every rank runs, imported by it: the parent names it, and needs nothing of it."""
    importlib.import_module("harness.worker.main").main(run_dir)


def _die_with(lifeline: Connection) -> None:
    wait([lifeline])
    os.kill(os.getpid(), signal.SIGKILL)


def _redirect(target: Path) -> None:
    """Standard output and error to a file, for C++ too. torch's own redirection does not exist on macOS."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _tell(report: Connection, message: Started | Done | Raised) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, and so is this rank in a moment
        report.send(message)


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF or int(error.code != 0)
    return int(error.code is not None)
