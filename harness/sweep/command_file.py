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
from harness.util.disk_reserve import release
from harness.util.errors import UserError
from harness.util.files import atomic_write_json
from harness.util.locks import is_locked, lock_file, run_lock

COMMAND_PREFIX = "command-"  # of their files, beside the locks


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
    place = folder / f"{COMMAND_PREFIX}{secrets.token_hex(4)}"
    command = CommandFile(socket.gethostname(), os.getpid(), time.time(), side_by_side, tuple(runs))
    with run_lock(place):
        with suppress(OSError):  # of no use but to be looked at
            atomic_write_json(command_file(place), asdict(command))
        try:
            yield
        finally:
            remove_command(place)
            if not read_commands(folder):
                release(folder)


def read_commands(folder: Path) -> list[tuple[CommandFile, bool]]:
    """Those that were begun and did not end, with whether each is alive; the newest last."""
    found = []
    for place in command_paths(folder):
        with suppress(OSError, ValueError, TypeError, UserError):
            found.append((from_dict(CommandFile, json.loads(command_file(place).read_text())), is_locked(place)))
    return sorted(found, key=lambda entry: entry[0].started_at)


def remove_dead_commands(folder: Path) -> None:
    """Removes what dead commands left, which this one takes over."""
    for place in command_paths(folder):
        if not is_locked(place):
            remove_command(place)


def command_paths(folder: Path) -> list[Path]:
    return [folder / path.stem for path in (folder / ".locks").glob(f"{COMMAND_PREFIX}*.json")]


def command_file(place: Path) -> Path:
    return lock_file(place).with_suffix(".json")


def remove_command(place: Path) -> None:
    command_file(place).unlink(missing_ok=True)
    lock_file(place).unlink(missing_ok=True)


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
