"""Stack traces of a rank's threads on demand, written by its signal handler whatever its code is doing."""

import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from harness.records.run_folder import RunFolder

DUMP_SECONDS = 0.5  # time for the handlers to write

MAIN_PATTERN = ("harness/launcher/rank_entry.py", "run_rank")  # file and function on every rank's main thread


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
    threads = path.read_text(errors="replace").split("\n\n") if path.exists() else []
    for thread in threads:
        frames = [frame_of(line) for line in thread.splitlines() if line.startswith('  File "')]
        if any(file.endswith(MAIN_PATTERN[0]) and function == MAIN_PATTERN[1] for file, _, function in frames):
            file, line, function = frames[0]
            return f"{function} ({Path(file).name}:{line})"
    return None


def frame_of(line: str) -> tuple[str, str, str]:
    """Return file, line and function of '  File "FILE", line 12 in FUNCTION', the format of faulthandler."""
    _, file, position = line.split('"', 2)
    number, _, function = position.removeprefix(", line ").partition(" in ")
    return file, number, function
