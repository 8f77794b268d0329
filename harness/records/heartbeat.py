"""The heartbeat of a rank: its progress and memory, in a small file that outlives the rank, however that ends."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.records.run_folder import Heartbeat, RunFolder

SAMPLE_SECONDS = 0.2  # between two samples of memory within a phase, because sampling costs more than writing

LINE_BYTES = 256  # one write of a fixed length, so that a reader never sees a part of it


class HeartbeatWriter:
    """The writer of a rank's heartbeat, which runs in the rank itself."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Prepare the heartbeat; the file is created with the first one."""
        self.path = RunFolder(run_dir).heartbeat(rank)
        self.process = psutil.Process()
        self.allocated_bytes: Callable[[], int | None] = lambda: None  # replaced as soon as the device is known
        self.descriptor: int | None = None
        self.last = Heartbeat("start", 0, None, None)
        self.sampled_at = 0.0
        self.phase_starts: dict[str, float] = {}  # the age of the process in seconds when each phase began

    def __call__(self, phase: str, step: int = 0) -> None:
        """Record progress. Memory is sampled at most every SAMPLE_SECONDS within a phase."""
        if phase not in self.phase_starts:
            self.phase_starts[phase] = process_age_seconds()
        is_due = phase != self.last.phase or time.monotonic() - self.sampled_at >= SAMPLE_SECONDS
        self.last = self.last._replace(phase=phase, step=step)
        if is_due:
            self.sample()
        else:
            self.write()

    def sample(self) -> Heartbeat:
        """Sample memory, write the heartbeat, and return it."""
        self.sampled_at = time.monotonic()
        rss = int(self.process.memory_info().rss)
        self.last = self.last._replace(allocated_bytes=self.allocated_bytes(), host_bytes=rss)
        self.write()
        return self.last

    def write(self) -> None:
        """Write the last heartbeat in place of the one before."""
        self.last = self.last._replace(beats=self.last.beats + 1)
        with contextlib.suppress(OSError):  # a full disk must not end a training
            if self.descriptor is None:
                self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self.descriptor, json.dumps(self.last).ljust(LINE_BYTES).encode(), 0)


def process_age_seconds() -> float:
    """Return the seconds since this process was started or forked.

    Linux says that in ticks of the clock that counts suspended time too (proc(5), starttime), and other systems in the
    time of day.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
