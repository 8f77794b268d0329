"""What a command is to run, listed where every shell finds it, and how long that will take."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.config.from_dict import from_dict
from harness.records.run_folder import COMMAND_PREFIX, ComparisonFolder
from harness.util.disk_reserve import release
from harness.util.errors import UserError
from harness.util.files import atomic_write_json
from harness.util.locks import is_locked, run_lock


@dataclass(frozen=True)
class PlannedRun:
    run_id: str
    cost: float  # comparable within the command


@dataclass(frozen=True)
class CommandFile:
    """A command at work, or one that died."""

    host: str
    pid: int
    started_at: float  # time.time()
    max_parallel: int  # runs at once
    runs: tuple[PlannedRun, ...]


@contextmanager
def register_command(folder: Path, runs: Sequence[PlannedRun], side_by_side: int) -> Iterator[None]:
    """Shows the command's runs while it works; what a killed one leaves is told by its lock, and removed here."""
    remove_dead_commands(folder)
    name = f"{COMMAND_PREFIX}{secrets.token_hex(4)}"
    command = CommandFile(socket.gethostname(), os.getpid(), time.time(), side_by_side, tuple(runs))
    with run_lock(ComparisonFolder(folder).lock(name)):
        with suppress(OSError):  # of no use but to be looked at
            atomic_write_json(ComparisonFolder(folder).command(name), asdict(command))
        try:
            yield
        finally:
            remove_command(folder, name)
            if not read_commands(folder):
                release(ComparisonFolder(folder).reserve)


def read_commands(folder: Path) -> list[tuple[CommandFile, bool]]:
    """Those that were begun and did not end, with whether each is alive; the newest last."""
    found = []
    files = ComparisonFolder(folder)
    for name in files.commands():
        with suppress(OSError, ValueError, TypeError, UserError):
            command: CommandFile = from_dict(CommandFile, json.loads(files.command(name).read_text()))
            found.append((command, is_locked(files.lock(name))))
    return sorted(found, key=lambda entry: entry[0].started_at)


def remove_dead_commands(folder: Path) -> None:
    """Removes what dead commands left, which this one takes over."""
    for name in ComparisonFolder(folder).commands():
        if not is_locked(ComparisonFolder(folder).lock(name)):
            remove_command(folder, name)


def remove_command(folder: Path, name: str) -> None:
    """Remove a command's queue and its lock."""
    ComparisonFolder(folder).command(name).unlink(missing_ok=True)
    ComparisonFolder(folder).lock(name).unlink(missing_ok=True)


def seconds_left(done: Sequence[tuple[float, float]], left: Sequence[float], side_by_side: int = 1) -> float | None:
    """An estimate from the (cost, seconds) of finished runs and the costs of those to come; None without any.

    A line through what was seen, a start and a share of the cost, where costs differ; its slope is never below zero.
    """
    if not done or not left:
        return None if left else 0.0
    costs, seconds = (np.array(column, dtype=float) for column in zip(*done, strict=True))
    slope = float(np.polyfit(costs / costs.max(), seconds, 1)[0] / costs.max()) if np.ptp(costs) else 0.0
    slope = max(0.0, slope)
    start = max(0.0, float(seconds.mean() - slope * costs.mean()))
    return (start * len(left) + slope * sum(left)) / min(side_by_side, len(left))
