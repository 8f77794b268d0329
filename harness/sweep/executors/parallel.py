"""Runs side by side on one machine, each in a process of its own, on devices or cores that no other has meanwhile."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.config.schema import ClusterConfig, ModelConfig
from harness.hardware.machine import Machine, usable_cores
from harness.hardware.nvml import visible_devices
from harness.launcher.launch import FORKSERVER, start_forkserver
from harness.launcher.monitor import HANDLED
from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from harness.runner.context import RunContext
from harness.runner.launch_run import write_row
from harness.runner.plan import Plan
from harness.runner.run import execute
from harness.sweep.display import ProgressDisplay
from harness.sweep.executors.base import local_machine, stored_record
from harness.sweep.queued_run import QueuedRun, plan_item
from harness.util.errors import UserError
from harness.util.locks import run_lock

WAIT_SECONDS = 0.2

START_ATTEMPTS = 5

END_SECONDS = 15.0  # for interrupted runs to write their records


@dataclass
class WorkerSlot:
    """A process that makes one run at a time."""

    process: Any
    pipe: Connection
    item: QueuedRun | None = None
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


def start(process: Any) -> None:
    """Starts it, however the server that forks it is killed meanwhile: another takes its place when it is dead."""
    for attempt in range(START_ATTEMPTS):
        try:
            process.start()
            return
        except (EOFError, OSError):
            if attempt == START_ATTEMPTS - 1:
                raise
            time.sleep(WAIT_SECONDS)


class ParallelExecutor:
    """Gives a run as many devices as it has ranks, with their share of the cores; on a CPU one of equal core sets."""

    def __init__(self, parallel: int | str, models: Sequence[ModelConfig], display: ProgressDisplay) -> None:
        self.models, self.display = models, display
        self.cores = usable_cores()
        self.parallel = parallel
        self.slots: list[WorkerSlot] = []
        self.machines: dict[ClusterConfig, Machine] = {}
        self.devices: list[str] = []
        self.before = {number: signal.getsignal(number) for number in HANDLED}
        set_signal_handlers(interrupted)

    @property
    def max_parallel(self) -> int:
        return len(self.core_sets()) if self.parallel == "auto" else int(self.parallel)

    def core_sets(self) -> list[tuple[int, ...]]:
        """The cores, divided equally among devices, or on a CPU among runs."""
        parts = len(self.devices) or (1 if self.parallel == "auto" else int(self.parallel))
        each = len(self.cores) // parts
        return [tuple(self.cores[index * each : (index + 1) * each]) for index in range(parts)]

    def plan_item(self, values: dict[str, Any], turn: int) -> QueuedRun:
        return plan_item(values, turn, self.machine)

    def machine(self, cluster: ClusterConfig) -> Machine:
        """A run's part of it on a CPU; on GPUs all devices, of which a run is given as many as it has ranks."""
        if cluster not in self.machines:
            found = local_machine(cluster)
            if found.device == "cuda":
                self.devices = visible_devices(found.devices)
            elif self.parallel != "auto" and int(self.parallel) > len(self.cores):
                rule = f"is more than the {len(self.cores)} cores: choose fewer"
                raise UserError(f"sweep.parallel={self.parallel} {rule}")
            else:
                sets = self.core_sets()
                found = replace(found, cores=len(sets[0]), sharing=len(sets))
            self.machines[cluster] = found
        return self.machines[cluster]

    def stored_record(self, item: QueuedRun) -> Record | None:
        return stored_record(item, self.display.print_line)

    def can_start(self, item: QueuedRun) -> bool:
        return self.free_devices_and_cores(item) is not None

    def free_devices_and_cores(self, item: QueuedRun) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
        """Devices and cores that are free and enough; None while there are not."""
        busy = [slot for slot in self.slots if slot.item is not None]
        if self.parallel != "auto" and len(busy) >= int(self.parallel):
            return None
        sets = self.core_sets()
        if not self.devices:
            taken = {slot.cores for slot in busy}
            free = [cores for cores in sets if cores not in taken]
            return ((), free[0]) if free else None
        assert item.plan is not None
        used = {device for slot in busy for device in slot.devices}
        indices = [index for index, device in enumerate(self.devices) if device not in used]
        wanted = min(item.plan.layout.world_size, len(self.devices))  # of more the run itself says what is wrong
        if len(indices) < wanted:
            return None
        chosen = indices[:wanted]
        return tuple(self.devices[i] for i in chosen), tuple(core for i in chosen for core in sets[i])

    def start(self, item: QueuedRun) -> None:
        found = self.free_devices_and_cores(item)
        assert found is not None and item.plan is not None
        work = (item.plan, *found)
        slot = next((slot for slot in list(self.slots) if slot.item is None and self.send_work(slot, work)), None)
        if slot is None:
            slot = self.new()
            slot.pipe.send(work)
        slot.item, (slot.devices, slot.cores) = item, found

    def send_work(self, slot: WorkerSlot, work: tuple[object, ...]) -> bool:
        """Whether an idle one could be told; one that has died since its last run is let go."""
        try:
            slot.pipe.send(work)
        except OSError:
            slot.process.join()
            self.slots.remove(slot)
            return False
        return True

    def new(self) -> WorkerSlot:
        start_forkserver("cuda", FORKSERVER)  # as clean as a command of its own, and dies with this one
        context = multiprocessing.get_context("forkserver")
        mine, theirs = context.Pipe()
        process = context.Process(target=worker_loop, args=(theirs, list(self.models)))
        start(process)
        theirs.close()
        self.slots.append(WorkerSlot(process, mine))
        return self.slots[-1]

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        self.display.show()
        busy = {slot.pipe: slot for slot in self.slots if slot.item is not None}
        found = [self.receive(busy[pipe]) for pipe in wait(list(busy), WAIT_SECONDS) if isinstance(pipe, Connection)]
        return [entry for entry in found if entry is not None]

    def receive(self, slot: WorkerSlot) -> tuple[QueuedRun, Record | None] | None:
        """What one has to say; the end of its run."""
        item = slot.item
        assert item is not None and item.plan is not None
        try:
            kind, value = slot.pipe.recv()
        except (EOFError, OSError):
            slot.process.join()
            self.slots.remove(slot)
            return item, record_of_killed_worker(item, slot.process.exitcode)
        if kind == "at":
            self.display.tick(item, value)
        elif kind == "say":
            self.display.print_line(value)
        elif kind == "raised":
            raise value
        else:
            slot.item = None
            return item, value
        return None

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """Ends what runs, and waits for its records."""
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
        for slot in self.slots:
            if slot.item is not None and slot.process.pid:
                slot.process.terminate()
        patience, found = time.monotonic() + END_SECONDS, []
        while any(slot.item for slot in self.slots) and time.monotonic() < patience:
            found += [(item, record) for item, record in self.poll() if record is not None]
        return found

    def close(self) -> None:
        for slot in self.slots:
            slot.process.kill()
            slot.process.join()
            slot.pipe.close()
        for number, handler in self.before.items():
            signal.signal(number, handler)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def set_signal_handlers(handler: Callable[..., None]) -> None:
    """What signals from outside do now; those that are to be ignored, nohup's wish, are."""
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def record_of_killed_worker(item: QueuedRun, code: int) -> Record | None:
    """The record of a run whose process was killed. None: another command has taken it up."""
    assert item.plan is not None
    how = signal.Signals(-code).name if code < 0 else f"code {code}"
    ending = {"status": "error", "reason": f"the process that ran it ended with {how}"}
    with run_lock(RunFolder(item.plan.directory).lock, wait=False) as is_mine:
        if not is_mine:
            return None
        return stored_record(item, lambda _: None) or write_row(item.plan, ending)


def worker_loop(pipe: Connection, models: list[ModelConfig]) -> None:
    """In the slot's process: the runs that it is given, until the command has no more or dies."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=die_with, args=(parent.sentinel,), daemon=True).start()
    set_signal_handlers(interrupted)  # while ranks run a signal ends them, and the run has its row
    while True:
        try:
            plan, devices, cores = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        try:
            pipe.send(("done", execute_plan(plan, pipe, models)))
        except KeyboardInterrupt:  # before or after that
            pipe.send(("done", None))
        except (OSError, UserError) as error:
            pipe.send(("raised", error))


def execute_plan(plan: Plan, pipe: Connection, models: list[ModelConfig]) -> Record | None:
    """One run, with what it says on the way."""
    said: list[Path] = []

    def tick(at: Path) -> None:
        if said != [at]:
            said[:] = [at]
            pipe.send(("at", at))

    means = RunContext(models=models, on_progress=tick, log=lambda line: pipe.send(("say", line)))
    return execute(plan, means)


def die_with(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
