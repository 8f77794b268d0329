"""The runs of one command: in which order, made where, until every one has its row."""

import time
from dataclasses import dataclass, field

from harness.records.schema import Record
from harness.sweep.executors.base import Executor, SweepObserver
from harness.sweep.queued_run import QueuedRun
from harness.sweep.stop_after import StopAfter
from harness.util.disk_reserve import has_free_space

RETRY_SECONDS = 0.5  # before a run that another command is at is looked for again


@dataclass
class Scheduler:
    executor: Executor
    observer: SweepObserver
    stop_after: StopAfter
    waiting: list[QueuedRun]
    running: list[QueuedRun] = field(default_factory=list)

    def run(self) -> None:
        """Until every run has its row, the budget is spent, or the disk is full. Raises KeyboardInterrupt."""
        self.waiting = [item for item in self.waiting if not self.is_done(item)]
        try:
            while self.waiting or self.running:
                self.start_ready()
                if not self.running:
                    if not self.waiting:
                        return
                    time.sleep(max(0.0, min(item.not_before for item in self.waiting) - time.monotonic()))
                    continue
                for item, record in self.executor.poll():
                    self.finish(item, record)
        except KeyboardInterrupt:
            for item, record in self.executor.interrupt():
                self.observer.on_record(item, record, True)
            raise
        finally:
            self.executor.close()

    def is_done(self, item: QueuedRun) -> bool:
        record = self.executor.stored_record(item)
        if record is not None:
            self.observer.on_record(item, record, False)
            self.enqueue_next(item, record)
        return record is not None

    def start_ready(self) -> None:
        """Everything that can be begun now, in order."""
        now = time.monotonic()
        for item in list(self.waiting):
            if item.not_before > now or not self.executor.can_start(item):
                continue
            why_not = self.stop_after.exceeded_limit() or self.disk_full_reason(item)
            if why_not:
                self.observer.log(f"{why_not}: {len(self.waiting)} runs are not begun; the same command goes on")
                self.waiting.clear()
                return
            self.waiting.remove(item)
            self.running.append(item)
            self.stop_after.started += 1
            if not item.locked_elsewhere:
                self.observer.on_started(item)
            self.executor.start(item)

    def disk_full_reason(self, item: QueuedRun) -> str:
        return "" if has_free_space(item.folder) else f"no room is left in {item.folder}"

    def finish(self, item: QueuedRun, record: Record | None) -> None:
        self.running.remove(item)
        if record is None:
            if not item.locked_elsewhere:
                self.observer.log(f"{item.name} is being run by another command: coming back to it")
            item.locked_elsewhere, item.not_before = True, time.monotonic() + RETRY_SECONDS
            self.stop_after.started -= 1
            self.waiting.append(item)
            return
        self.stop_after.count_failure(record["row"]["status"])
        self.observer.on_record(item, record, True)
        self.enqueue_next(item, record)

    def enqueue_next(self, item: QueuedRun, record: Record) -> None:
        """What a search tries next, before everything else."""
        if item.search is None:
            return
        found = item.search.next(record)
        if found is None:
            self.observer.log(item.search.result())
            return
        following = QueuedRun(found.config, found, found.run_id, item.repeat_index, item.search)
        if not self.is_done(following):
            self.waiting.insert(0, following)
