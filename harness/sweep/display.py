"""The progress of a command's runs on standard error: live lines in a terminal, plain ones elsewhere."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from harness.sweep.command_file import seconds_left
from harness.sweep.queued_run import QueuedRun
from harness.util.redact import redacted
from harness.util.text import LastingStream, count_text, format_bytes, format_duration, sanitize

PLAIN_SECONDS = 10.0  # between two reports of running runs where there is no terminal


@dataclass
class RunProgress:
    """A run in progress, and the first step that was seen of it."""

    label: str
    steps: int
    started_at: float  # time.monotonic()
    folder: Path | None = None  # that its ranks write to: first the reference's, then its own
    first: tuple[int, float] | None = None  # step and time.monotonic(), since the folder is this one
    note: str = ""  # shown until its ranks report a phase

    def text(self, now: float) -> str:
        """Return the line that shows the run at this time.monotonic()."""
        beat = RunFolder(self.folder).read_heartbeat(0) if self.folder else None
        phase, step = (beat.phase, beat.step) if beat else (self.note or "starting", 0)
        if self.first is None and step:
            self.first = (step, now)
        rate = ""
        if self.first is not None and step > self.first[0]:
            rate = f", {(step - self.first[0]) / (now - self.first[1]):.1f} steps/s"
        reference = "reference, " if self.folder and RunFolder(self.folder).is_reference else ""
        return f"{self.label}: {reference}{phase}, step {step} of {self.steps}{rate}, {now - self.started_at:.0f} s"


class ProgressDisplay:
    """The display of a command's progress, which is told of every run; standard output holds results alone."""

    def __init__(self) -> None:
        self.console = Console(file=LastingStream(sys.stderr), highlight=False)  # type: ignore[arg-type]
        self.total = 0
        self.position = 0
        self.has_repeats = False  # whether labels say which repeat a run is
        self.max_parallel = 1
        self.running: dict[QueuedRun, RunProgress] = {}
        self.left: dict[QueuedRun, float] = {}  # costs of runs without a record
        self.finished: list[tuple[float, float]] = []  # costs and seconds of runs that ended
        self.printed_at = time.monotonic()
        self.status: Status | None = None

    def set_queue(self, runs: list[QueuedRun], max_parallel: int) -> None:
        """Set the runs to be made, each of them once, and how many can run at a time."""
        self.total = self.position + len(runs)
        self.has_repeats = any(run.repeat_index for run in runs)
        self.left = {run: run.cost for run in runs}
        self.max_parallel = max_parallel

    def run_started(self, run: QueuedRun) -> None:
        """Show that a run is started."""
        self.position += 1
        label = self.label(run.name, run.config.repeat)
        self.running[run] = RunProgress(label, run.config.train.total_steps, time.monotonic())
        self.left.setdefault(run, run.cost)
        self.total = max(self.total, self.position)
        if not self.console.is_terminal:
            plan = run.plan
            ranks = f": {count_text(plan.layout.world_size, 'rank')}, {plan.machine.device}" if plan else ""
            self.print_line(f"{label}{ranks}")
        elif self.status is None:
            self.status = self.console.status(Text(f"{label}: preparing"))
            self.status.start()

    def update(self, run: QueuedRun, folder: Path) -> None:
        """Show a run's progress; called several times a second while ranks run, perhaps from another thread."""
        self.set_folder(run, folder)
        self.show()

    def set_folder(self, run: QueuedRun, folder: Path) -> None:
        """Set the folder that a run's ranks write to: its own, or that of its reference."""
        progress = self.running.get(run)
        if progress is None or progress.folder == folder:
            return
        progress.folder, progress.first = folder, None
        if not RunFolder(folder).is_reference:
            self.ranks_starting(run, folder)

    def ranks_starting(self, run: QueuedRun, run_dir: Path) -> None:
        """Notice, once for every run, that its ranks are being started in its folder."""

    def set_note(self, run: QueuedRun, note: str) -> None:
        """Set what is shown of a running run until its ranks report a phase."""
        if run in self.running:
            self.running[run].note = note

    def show(self) -> None:
        """Show all running runs; without a terminal, at most every PLAIN_SECONDS."""
        now = time.monotonic()
        if self.status is None and now - self.printed_at < PLAIN_SECONDS:
            return
        lines = [progress.text(now) for progress in list(self.running.values())]
        if lines and len(self.left) > 1:
            lines.append(f"{self.total - len(self.left)} of {self.total} runs are recorded{self.eta_text(now)}")
        if self.status is not None:
            self.status.update(Text("\n".join(lines)))
            return
        self.printed_at = now
        for line in lines:
            self.print_line(line)

    def eta_text(self, now: float) -> str:
        """Return how long the remaining runs may take, as the end of a line; '' before the first run has ended."""
        left = seconds_left(self.finished, list(self.left.values()), self.max_parallel)
        if left is None:
            return ""
        spent = sum(now - progress.started_at for progress in list(self.running.values())) / self.max_parallel
        return f", about {format_duration(max(0.0, left - spent))} left"

    def run_ended(self, run: QueuedRun, record: Record) -> None:
        """Show a run's record, new or stored before."""
        progress = self.running.pop(run, None)
        cost = self.left.pop(run, None)
        if progress is None:  # the record was stored before
            self.position += 1
        elif cost is not None and record.row.get("duration_seconds"):
            self.finished.append((cost, time.monotonic() - progress.started_at))
        if not self.running:
            self.close()
        self.print_result(progress.label if progress else self.label(run.name, run.config.repeat), record)

    def run_retried(self, run: QueuedRun, record: Record, pause_seconds: float) -> None:
        """Show why a run's attempt ended, and when the next one starts."""
        progress = self.running[run]
        progress.folder, progress.first, progress.note = None, None, "waiting to be run again"
        again = f"it is run again in {pause_seconds:g} s, {run.retried} of retries={run.command.retries}"
        self.print_line(f"{progress.label}: ended from outside, {sanitize(record.row['reason'])}; {again}")

    def close(self) -> None:
        """Remove the live lines."""
        if self.status is not None:
            self.status.stop()
            self.status = None

    def run_rejected(self, record: Record) -> None:
        """Show that a combination is impossible."""
        self.position += 1
        self.print_result(self.label(record.run_id, None), record)

    def print_result(self, label: str, record: Record) -> None:
        """Print how a run ended: its speed, with what disturbed it, or the reason.

        The table, which follows, has the reasons of runs that were refused, so that each is printed once.
        """
        row = record.row
        speed, peak, noise = (row.get(key) for key in ("tokens_per_second", "peak_allocated_bytes", "noise_warning"))
        if record.status == "refused":
            result = ""
        elif record.status != "ok":
            result = f", {sanitize(row['reason'])}"
        elif speed is not None:
            result = f", {speed:,.0f} tokens/s"
        else:  # a simulation without a described cluster knows no times
            result = ", " if peak is None else f", peak {format_bytes(peak)}"
        if record.status == "ok" and noise:
            result += f", disturbed ({sanitize(noise)})"
        self.print_line(f"{label}: {record.status}{result}")

    def label(self, name: str, repeat: int | None) -> str:
        """Return a run's number among those of the command, and its name."""
        suffix = f" repeat {repeat}" if self.has_repeats and repeat is not None else ""
        return f"[{self.position}/{self.total}] {name}{suffix}"

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(Text(redacted(sanitize(line))), soft_wrap=True)
        self.console.file.flush()
