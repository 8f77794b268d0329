"""The loop of one command: its runs started in order by an executor until every one has its record."""

import time
from dataclasses import dataclass, field

from harness.records.schema import Record
from harness.sweep.executors.base import Executor
from harness.sweep.queued_run import QueuedRun
from harness.sweep.stop_after import FAILURES, StopAfter
from harness.util.disk_reserve import has_free_space
from harness.util.text import count_text

RETRY_SECONDS = 0.5  # before a run that another command works on is tried again


@dataclass
class Scheduler:
    """The runs of one command, and the executor that makes them."""

    executor: Executor
    stop_after: StopAfter
    waiting: list[QueuedRun]
    running: list[QueuedRun] = field(default_factory=list)

    def run(self) -> None:
        """Work until every run has its record, a limit is reached, or the disk is full. Raises KeyboardInterrupt."""
        self.waiting = [run for run in self.waiting if not self.is_done(run)]
        try:
            while self.waiting or self.running:
                self.start_ready()
                if not self.running:
                    if not self.waiting:
                        return
                    time.sleep(max(0.0, min(run.not_before for run in self.waiting) - time.monotonic()))
                    continue
                for run, record in self.executor.poll():
                    self.finish(run, record)
        except KeyboardInterrupt:
            for run, record in self.executor.interrupt():
                self.executor.display.run_ended(run, record, is_new=True)
            raise
        finally:
            self.executor.close()

    def is_done(self, run: QueuedRun) -> bool:
        """Return whether the run has a reusable record, and show that record."""
        record = self.executor.stored_record(run)
        if record is not None:
            self.executor.display.run_ended(run, record, is_new=False)
            self.enqueue_next(run, record)
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
        if record is None:
            if not run.locked_elsewhere:
                self.executor.display.print_line(f"{run.name} is being run by another command: it is tried again later")
            run.locked_elsewhere, run.not_before = True, time.monotonic() + RETRY_SECONDS
            self.stop_after.started -= 1
            self.waiting.append(run)
            return
        self.stop_after.failed += record.status in FAILURES
        self.executor.display.run_ended(run, record, is_new=True)
        self.enqueue_next(run, record)

    def enqueue_next(self, run: QueuedRun, record: Record) -> None:
        """Put the next run of a search before all others, or log the search's result."""
        if run.search is None:
            return
        plan = run.search.next(record)
        if plan is None:
            self.executor.display.print_line(run.search.result())
            return
        following = QueuedRun(plan.config, plan.command, plan, plan.run_id, run.repeat_index, run.search)
        if not self.is_done(following):
            self.waiting.insert(0, following)
