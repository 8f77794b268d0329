"""The file that lists a command's runs where every shell finds it, and an estimate of the time that they take."""

import os
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from harness.config.from_dict import Positive, from_dict
from harness.records.run_folder import COMMAND_PREFIX, ComparisonFolder
from harness.util.files import atomic_write_json, read_json_object, release
from harness.util.locks import file_lock, is_locked, remove_lock
from harness.util.text import UserError


@dataclass(frozen=True)
class PlannedRun:
    """A run of a command's queue."""

    run_id: str
    cost: float  # comparable within the command


@dataclass(frozen=True)
class CommandFile:
    """The queue of a command that is running, or that died."""

    host: str
    pid: int
    started_at: float  # time.time()
    max_parallel: Positive  # runs at once
    runs: tuple[PlannedRun, ...]


@contextmanager
def register_command(comparison: ComparisonFolder, runs: Sequence[PlannedRun], max_parallel: int) -> Iterator[None]:
    """List the command's runs while the block runs; lists of dead commands, which no process locks, are removed."""
    for dead in comparison.commands():
        if not is_locked(comparison.lock(dead)):
            remove_command(comparison, dead)
    name = f"{COMMAND_PREFIX}{secrets.token_hex(4)}"
    command = CommandFile(socket.gethostname(), os.getpid(), time.time(), max_parallel, tuple(runs))
    with file_lock(comparison.lock(name)):
        with suppress(OSError):  # the list only informs: the command works without it
            atomic_write_json(comparison.command(name), asdict(command))
        try:
            yield
        finally:
            remove_command(comparison, name)
            if not read_commands(comparison):
                release(comparison.reserve)


def read_commands(comparison: ComparisonFolder) -> list[tuple[CommandFile, bool]]:
    """Return the commands that have not ended properly, newest last, each with whether it is alive."""
    commands = []
    for name in comparison.commands():
        with suppress(UserError):
            command = from_dict(CommandFile, read_json_object(comparison.command(name)))
            commands.append((command, is_locked(comparison.lock(name))))
    return sorted(commands, key=lambda entry: entry[0].started_at)


def remove_command(comparison: ComparisonFolder, name: str) -> None:
    """Remove a command's list and its lock."""
    for path in (comparison.command(name), *comparison.locks.glob(f".{name}.json.*.tmp")):
        path.unlink(missing_ok=True)
    remove_lock(comparison.lock(name))


def seconds_left(done: Sequence[tuple[float, float]], left: Sequence[float], max_parallel: int = 1) -> float | None:
    """Estimate the seconds that the remaining runs take; None before the first run is done.

    `done` has the (cost, seconds) of finished runs, `left` the costs of the remaining ones. Seconds are fitted by a
    line, a start plus a share of the cost, where costs differ; its slope is never below zero.
    """
    if not done or not left:
        return None if left else 0.0
    costs, seconds = zip(*done, strict=True)
    slope = max(0.0, statistics.linear_regression(costs, seconds).slope) if min(costs) < max(costs) else 0.0
    start = max(0.0, statistics.fmean(seconds) - slope * statistics.fmean(costs))
    return (start * len(left) + slope * sum(left)) / min(max_parallel, len(left))
