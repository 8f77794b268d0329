"""How far a rank is and what it holds, in a small file of its own: it outlives the rank, however that ends."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.records.run_folder import RunFolder

SAMPLE_SECONDS = 0.2  # between two looks at memory within a phase: they cost more than the line they are written on

LINE_BYTES = 256  # of a beat: one write of a fixed length, which a reader finds whole


class Heartbeat(NamedTuple):
    phase: str
    step: int
    allocated_bytes: int | None  # on its device, by torch's allocator; None: not counted
    host_bytes: int | None  # resident memory of the process


class HeartbeatWriter:
    """Written by the rank itself."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = RunFolder(run_dir).heartbeat(rank)
        self.process = psutil.Process()
        self.allocated_bytes: Callable[[], int | None] = lambda: None  # set when there is something to ask
        self.descriptor: int | None = None
        self.last = Heartbeat("start", 0, None, None)
        self.sampled_at = 0.0

    def __call__(self, phase: str, step: int = 0) -> None:
        is_due = phase != self.last.phase or time.monotonic() - self.sampled_at >= SAMPLE_SECONDS
        self.last = self.last._replace(phase=phase, step=step)
        if is_due:
            self.sample()
        else:
            self.write()

    def sample(self) -> Heartbeat:
        """How things are now, written down too."""
        self.sampled_at = time.monotonic()
        held = int(self.process.memory_info().rss)
        self.last = self.last._replace(allocated_bytes=self.allocated_bytes(), host_bytes=held)
        self.write()
        return self.last

    def write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a training
            if self.descriptor is None:
                self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self.descriptor, json.dumps(self.last).ljust(LINE_BYTES).encode(), 0)


def read_heartbeat(run_dir: Path, rank: int) -> Heartbeat | None:
    """The last beat of a rank; None before the first."""
    try:
        return Heartbeat(*json.loads(RunFolder(run_dir).heartbeat(rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
