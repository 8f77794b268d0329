"""Where every thread of a rank stands, on demand: written by the rank's signal handler, whatever its code is doing."""

import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from harness.records.run_folder import RunFolder

DUMP_SECONDS = 0.5  # for handlers to have written

MAIN_PATTERN = ("harness/launcher/rank_entry.py", "run_rank")  # file and function that every rank's main thread is in


def enable_dump(run_dir: Path, rank: int) -> None:
    """In a rank: from here on SIGUSR1 writes its stacks down. A handler in C, it needs no turn of the interpreter."""
    file = RunFolder(run_dir).stacks(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def request_dumps(pids: Iterable[int]) -> None:
    """Has these ranks, which offer it, write down where they stand."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)


def remove_empty(run_dir: Path, ranks: Iterable[int]) -> None:
    """Removes the files of ranks that were not asked."""
    for path in (RunFolder(run_dir).stacks(rank) for rank in ranks):
        if path.exists() and not path.stat().st_size:
            path.unlink()


def main_thread_location(run_dir: Path, rank: int) -> str:
    """Where a rank's main thread stood: function, file and line; '' if it did not say."""
    path = RunFolder(run_dir).stacks(rank)
    threads = path.read_text(errors="replace").split("\n\n") if path.exists() else []
    for thread in threads:
        frames = [frame_of(line) for line in thread.splitlines() if line.startswith('  File "')]
        if any(file.endswith(MAIN_PATTERN[0]) and function == MAIN_PATTERN[1] for file, _, function in frames):
            file, line, function = frames[0]
            return f"{function} ({Path(file).name}:{line})"
    return ""


def frame_of(line: str) -> tuple[str, str, str]:
    """File, line and function of '  File "FILE", line 12 in FUNCTION', as faulthandler writes it."""
    _, file, where = line.split('"', 2)
    number, _, function = where.removeprefix(", line ").partition(" in ")
    return file, number, function
