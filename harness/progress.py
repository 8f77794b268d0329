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

from harness import locks, room
from harness.errors import UserError
from harness.records import atomic_write_json
from harness.typed import from_dict

PREFIX = "command-"  # of their files, beside the locks


@dataclass(frozen=True)
class Listed:
    run_id: str
    cost: float  # comparable within the command


@dataclass(frozen=True)
class Command:
    """A command at work, or one that died."""

    host: str
    pid: int
    began: float  # time.time()
    side_by_side: int  # runs at once
    runs: tuple[Listed, ...]


@contextmanager
def listed(folder: Path, runs: Sequence[Listed], side_by_side: int) -> Iterator[None]:
    """Shows the command's runs while it works; what a killed one leaves is told by its lock, and removed here."""
    tidy(folder)
    place = folder / f"{PREFIX}{secrets.token_hex(4)}"
    command = Command(socket.gethostname(), os.getpid(), time.time(), side_by_side, tuple(runs))
    with locks.alone(place):
        with suppress(OSError):  # of no use but to be looked at
            atomic_write_json(file_of(place), asdict(command))
        try:
            yield
        finally:
            remove(place)
            if not commands(folder):
                room.give(folder)


def commands(folder: Path) -> list[tuple[Command, bool]]:
    """Those that were begun and did not end, with whether each is alive; the newest last."""
    found = []
    for place in places(folder):
        with suppress(OSError, ValueError, TypeError, UserError):
            found.append((from_dict(Command, json.loads(file_of(place).read_text())), locks.is_held(place)))
    return sorted(found, key=lambda entry: entry[0].began)


def tidy(folder: Path) -> None:
    """Removes what dead commands left, which this one takes over."""
    for place in places(folder):
        if not locks.is_held(place):
            remove(place)


def places(folder: Path) -> list[Path]:
    return [folder / path.stem for path in (folder / ".locks").glob(f"{PREFIX}*.json")]


def file_of(place: Path) -> Path:
    return locks.lock_file(place).with_suffix(".json")


def remove(place: Path) -> None:
    file_of(place).unlink(missing_ok=True)
    locks.lock_file(place).unlink(missing_ok=True)


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
