"""What is seen while runs work: live lines in a terminal, plain ones elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from harness.records import heartbeat
from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from harness.sweep import command_file
from harness.util.text import sanitize

if TYPE_CHECKING:
    from harness.sweep.queued_run import QueuedRun


PLAIN_SECONDS = 10.0  # between two lines about running runs where there is no terminal


@dataclass
class RunProgress:
    """A run at work, and the first progress seen of it."""

    label: str
    steps: int
    began: float
    at: Path | None = None  # the folder that its ranks write to now: the reference's, then its own
    first: tuple[Path, int, float] | None = None  # folder, step and time
    note: str = ""  # what is said of it before its ranks say anything

    def text(self, now: float) -> str:
        beat = heartbeat.read_heartbeat(self.at, 0) if self.at else None
        phase, step = (beat.phase, beat.step) if beat else (self.note or "starting", 0)
        if self.at and (self.first is None or self.first[0] != self.at):
            self.first = (self.at, step, now) if step else None
        rate = ""
        if self.first is not None and step > self.first[1]:
            rate = f", {(step - self.first[1]) / (now - self.first[2]):.1f} steps/s"
        which = "reference, " if self.at and RunFolder(self.at).is_reference else ""
        return f"{self.label}: {which}{phase}, step {step} of {self.steps}{rate}, {now - self.began:.0f} s"


class ProgressDisplay:
    """Progress on standard error, so that standard output holds results alone."""

    def __init__(self, started: "Callable[[QueuedRun, Path], None]" = lambda *_: None) -> None:
        self.started = started  # told once of every run's folder, when its ranks are being started
        self.console = Console(stderr=True, highlight=False)
        self.total = 0
        self.position = 0
        self.repeated = False  # whether runs that differ in `repeat` alone follow each other
        self.max_parallel = 1
        self.running: dict[QueuedRun, RunProgress] = {}
        self.left: dict[QueuedRun, float] = {}  # costs of what has no record yet
        self.finished: list[tuple[float, float]] = []  # costs and seconds of what was run
        self.printed_at = time.monotonic()
        self.status: Status | None = None

    def set_queue(self, items: "list[QueuedRun]", side_by_side: int) -> None:
        self.total = self.position + len(items)  # runs asked for twice are one
        self.repeated = any(item.repeat_index for item in items)
        self.left = {item: item.cost for item in items}
        self.max_parallel = side_by_side

    def show_composed(self, count: int) -> None:
        """So many combinations are known; of five hundred that takes Hydra a minute or two."""
        if time.monotonic() - self.printed_at >= PLAIN_SECONDS:
            self.printed_at = time.monotonic()
            self.print_line(f"{count} combinations composed")

    def run_started(self, item: "QueuedRun") -> None:
        """A run is begun."""
        self.position += 1
        label = self.label(item.name, item.config.repeat)
        self.running[item] = RunProgress(label, item.config.train.total_steps, time.monotonic())
        self.left.setdefault(item, item.cost)
        self.total = max(self.total, self.position)
        if not self.console.is_terminal:
            ranks = f": {item.plan.layout.world_size} ranks, {item.plan.machine.device}" if item.plan else ""
            self.print_line(f"{label}{ranks}")
        elif self.status is None:
            self.status = self.console.status(Text(f"{label}: preparing"))
            self.status.start()

    def tick(self, item: "QueuedRun", folder: Path) -> None:
        """Called several times a second while ranks run, perhaps from another thread."""
        self.set_folder(item, folder)
        self.show()

    def set_folder(self, item: "QueuedRun", at: Path) -> None:
        running = self.running.get(item)
        if running is None or running.at == at:
            return
        running.at = at
        if not RunFolder(at).is_reference:
            self.started(item, at)

    def note(self, item: "QueuedRun", note: str) -> None:
        if item in self.running:
            self.running[item].note = note

    def show(self) -> None:
        now = time.monotonic()
        if self.status is None and now - self.printed_at < PLAIN_SECONDS:
            return
        lines = [one.text(now) for one in list(self.running.values())]
        if lines and len(self.left) > 1:
            lines.append(f"{self.total - len(self.left)} of {self.total} runs have their row{self.eta_text(now)}")
        if self.status is not None:
            self.status.update(Text("\n".join(lines)))
            return
        self.printed_at = now
        for line in lines:
            self.print_line(line)

    def eta_text(self, now: float) -> str:
        """An estimate of what is left, '' before the first run has ended."""
        left = command_file.seconds_left(self.finished, list(self.left.values()), self.max_parallel)
        if left is None:
            return ""
        spent = sum(now - one.began for one in list(self.running.values())) / self.max_parallel
        return f", about {format_duration(max(0.0, left - spent))} left"

    def run_ended(self, item: "QueuedRun", record: Record, is_new: bool) -> None:
        """A run has its record."""
        running = self.running.pop(item, None)
        cost = self.left.pop(item, None)
        if running is None:  # its record was on file
            self.position += 1
        elif is_new and cost is not None and record["row"].get("seconds"):
            self.finished.append((cost, time.monotonic() - running.began))
        if not self.running:
            self.close()
        self.line(running.label if running else self.label(item.name, item.config.repeat), record)

    def close(self) -> None:
        """Nothing is live any more."""
        if self.status is not None:
            self.status.stop()
            self.status = None

    def run_rejected(self, record: Record) -> None:
        """A combination is impossible."""
        self.position += 1
        self.line(self.label(record["row"]["run_id"], None), record)

    def line(self, label: str, record: Record) -> None:
        row = record["row"]
        ok = row["status"] == "ok"
        told = f"{row['tokens_per_second']:,.0f} tokens/s" if ok else sanitize(row["reason"])
        self.print_line(f"{label}: {row['status']}, {told}")

    def label(self, name: str, repeat: int | None) -> str:
        """A run's number among those of the command, and its name."""
        told = f" repeat {repeat}" if self.repeated and repeat is not None else ""
        return f"[{self.position}/{self.total}] {name}{told}"

    def print_line(self, line: str) -> None:
        """A line that stays."""
        self.console.print(Text(sanitize(line)), soft_wrap=True)
        sys.stderr.flush()


def format_duration(seconds: float) -> str:
    """To read: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
