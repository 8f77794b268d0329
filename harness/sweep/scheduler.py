"""The loop of one command: its runs started in order by an executor until every one has its record.

A command may have limits, after which it starts no further run: stop_after=8h,20runs,3failures.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from harness.config.from_dict import ConfigValues
from harness.records.schema import Record
from harness.sweep.queued_run import Ended, QueuedRun, queue_plan
from harness.util.disk_reserve import has_free_space
from harness.util.errors import UserError
from harness.util.text import count_text

if TYPE_CHECKING:  # a command's limits are checked before what shows its runs is loaded
    from harness.sweep.display import ProgressDisplay

RETRY_SECONDS = 0.5  # before a run that another command works on is tried again

FAILURES = ("error", "timeout")  # the statuses of failed runs

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # of a limit in seconds


class Executor(Protocol):
    """The part of a command that makes runs: in this process, side by side in others, or as jobs of a cluster."""

    display: "ProgressDisplay"

    @property
    def max_parallel(self) -> int:
        """The number of runs that it can make at the same time."""

    def plan_run(self, values: ConfigValues, repeat_index: int) -> QueuedRun:
        """Return the run of composed values, planned if its machine is known. Raises UserError if it is impossible."""

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the run's stored record if it can be reused."""

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether the run can be started now, beside those that run."""

    def start(self, run: QueuedRun) -> None:
        """Start the run."""

    def poll(self) -> Ended:
        """Return the runs that ended, after a short wait if none has, with their records."""

    def interrupt(self) -> Ended:
        """End the runs in progress and return them with their records."""

    def close(self) -> None:
        """Release what the executor has."""


@dataclass
class StopAfter:
    """The limits of a command, by their units, and how much of them is used up."""

    limits: dict[str, float] = field(default_factory=dict)  # of "s", "runs" and "failures"
    started_at: float = field(default_factory=time.monotonic)
    started: int = 0  # runs
    failed: int = 0  # runs

    def exceeded_limit(self) -> str:
        """Return a phrase such as "stop_after=20runs is reached" if a limit is reached; '' while none is."""
        used = {"s": time.monotonic() - self.started_at, "runs": self.started, "failures": self.failed}
        reached = (unit for unit, number in used.items() if number >= self.limits.get(unit, math.inf))
        return next((f"stop_after={self.limits[unit]:.15g}{unit} is reached" for unit in reached), "")


def parse_stop_after(entries: Sequence[str | int | float]) -> StopAfter:
    """Return the limits of stop_after's entries: seconds, or a number with s, m, h, d, runs or failures.

    Raises UserError for any other entry.
    """
    limits: dict[str, float] = {}
    for entry in entries:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)|(\d+)\s*(runs|failures)", str(entry))
        if match is None:
            raise UserError(f"stop_after={entry} is not a limit: choose a time such as 90m or 8h, 20runs, or 3failures")
        seconds, unit, number, counted = match.groups()
        limits[counted or "s"] = float(number) if counted else float(seconds) * UNITS[unit]
    return StopAfter(limits)


@dataclass
class Scheduler:
    """The runs of one command, and the executor that makes them."""

    executor: Executor
    stop_after: StopAfter
    waiting: list[QueuedRun]
    running: list[QueuedRun] = field(default_factory=list)

    def run(self) -> None:
        """Work until every run has its record, a limit is reached, or the disk is full. Raises KeyboardInterrupt."""
        for run in list(self.waiting):
            if self.is_done(run):
                self.waiting.remove(run)
        try:
            while self.waiting or self.running:
                self.start_ready()
                if self.running:
                    for run, record in self.executor.poll():
                        self.finish(run, record)
                elif self.waiting:
                    time.sleep(max(0.0, min(run.not_before for run in self.waiting) - time.monotonic()))
        except KeyboardInterrupt:
            for run, record in self.executor.interrupt():
                if record is not None:
                    self.executor.display.run_ended(run, record)
            raise
        finally:
            self.executor.close()

    def is_done(self, run: QueuedRun) -> bool:
        """Return whether the run has a reusable record, and show that record."""
        record = self.executor.stored_record(run)
        if record is not None:
            self.record_run(run, record)
        return record is not None

    def start_ready(self) -> None:
        """Start every waiting run that can be started now, in order; drop all of them at a limit."""
        now = time.monotonic()
        for run in list(self.waiting):
            if run.not_before > now or not self.executor.can_start(run):
                continue
            reason = self.stop_after.exceeded_limit()
            if not reason and not has_free_space(run.comparison.path):
                reason = f"no disk space is left in {run.comparison.path}"
            if reason:
                remaining = count_text(len(self.waiting), "run")
                self.executor.display.print_line(f"{reason} with {remaining} left: the same command continues")
                self.waiting.clear()
                return
            self.waiting.remove(run)
            self.running.append(run)
            self.stop_after.started += 1
            if not run.locked_elsewhere:
                self.executor.display.run_started(run)
            self.executor.start(run)

    def finish(self, run: QueuedRun, record: Record | None) -> None:
        """Show a run's record; queue a run without one again: another command is working on it."""
        self.running.remove(run)
        if record is not None:
            self.stop_after.failed += record.status in FAILURES
            self.record_run(run, record)
            return
        if not run.locked_elsewhere:
            self.executor.display.print_line(f"{run.name} is being run by another command: it is tried again later")
        run.locked_elsewhere, run.not_before = True, time.monotonic() + RETRY_SECONDS
        self.stop_after.started -= 1
        self.waiting.append(run)

    def record_run(self, run: QueuedRun, record: Record) -> None:
        """Show a run's record, and put the next run of its search before all others, or log the search's result."""
        self.executor.display.run_ended(run, record)
        if run.search is None:
            return
        plan = run.search.next(record)
        if plan is None:
            self.executor.display.print_line(run.search.result())
            return
        following = queue_plan(plan, run.repeat_index, run.search)
        if not self.is_done(following):
            self.waiting.insert(0, following)
