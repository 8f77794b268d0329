"""What is seen while runs work: a live line in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from harness import pulse
from harness.errors import printable
from harness.records import Record

if TYPE_CHECKING:
    from harness.run import Plan

PLAIN_SECONDS = 10.0  # between two lines about the same run where there is no terminal


class Display:
    """Progress on standard error, so that standard output holds results alone."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.total = 1
        self.position = 0
        self.repeated = False  # whether runs that differ in `repeat` alone follow each other
        self.label = ""
        self.steps = 0
        self.began = self.said = time.monotonic()
        self.status: Status | None = None
        self.first: tuple[Path, int, float] | None = None  # run, step and time of the first progress seen of it

    @contextmanager
    def running(self, planned: "Plan") -> Iterator[None]:
        """Around one run."""
        config = planned.config
        self.label = self.label_of(planned.run_id, config.repeat)
        self.steps = config.train.all_steps
        self.began = self.said = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"{self.label}: {planned.layout.world_size} ranks, {planned.machine.device}")
            yield
            return
        with self.console.status(Text(f"{self.label}: preparing")) as self.status:
            yield
        self.status = None

    def tick(self, run_dir: Path) -> None:
        """Called several times a second while ranks run, from another thread."""
        beat = pulse.read(run_dir, 0)
        phase, step = (beat.phase, beat.step) if beat else ("starting", 0)
        now = time.monotonic()
        if self.first is None or self.first[0] != run_dir:
            self.first = (run_dir, step, now) if step else None
        rate = ""
        if self.first is not None and step > self.first[1]:
            rate = f", {(step - self.first[1]) / (now - self.first[2]):.1f} steps/s"
        which = "reference, " if run_dir.parent.name == "references" else ""
        text = f"{self.label}: {which}{phase}, step {step} of {self.steps}{rate}, {now - self.began:.0f} s"
        if self.status is not None:
            self.status.update(Text(text))
        elif time.monotonic() - self.said >= PLAIN_SECONDS:
            self.said = time.monotonic()
            self.say(text)

    def finished(self, record: Record) -> None:
        row = record["row"]
        ok = row["status"] == "ok"
        told = f"{row['tokens_per_second']:,.0f} tokens/s" if ok else printable(row["reason"])
        self.say(f"{self.label_of(row['run_id'], row.get('repeat'))}: {row['status']}, {told}")

    def label_of(self, run_id: str, repeat: int | None) -> str:
        """A run's number among those of the command, and its name."""
        told = f" repeat {repeat}" if self.repeated and repeat is not None else ""
        return f"[{self.position}/{self.total}] {run_id}{told}"

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(Text(printable(line)), soft_wrap=True)
        sys.stderr.flush()
