"""The executor that makes runs side by side on one machine, each in a process with devices or cores of its own."""

import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.config.model import ModelConfig
from harness.config.schema import ClusterConfig
from harness.hardware.device_placement import DevicePlacement, place_devices
from harness.hardware.machine import Machine, usable_cores
from harness.launcher.forkserver import FORKSERVER, start_forkserver
from harness.launcher.monitor import HANDLED
from harness.records.schema import Cells, Record
from harness.runner.launch_run import write_row
from harness.runner.reuse import reusable_record
from harness.sweep.display import ProgressDisplay
from harness.sweep.executors.base import LocalExecutor
from harness.sweep.executors.parallel_worker import raise_interrupt, set_signal_handlers, worker_loop
from harness.sweep.queued_run import QueuedRun
from harness.util.errors import UserError
from harness.util.locks import run_lock

WAIT_SECONDS = 0.2  # for messages of workers, and between attempts to start one

START_ATTEMPTS = 5

END_SECONDS = 15.0  # for interrupted runs to write their records


@dataclass
class WorkerSlot:
    """A worker process that makes one run at a time, and what its run may use."""

    process: Any
    pipe: Connection
    run: QueuedRun | None = None  # None: the worker is idle
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


def start_process(process: Any) -> None:
    """Start a process. If the server that forks it was killed, try again: multiprocessing then starts another."""
    for attempt in range(START_ATTEMPTS):
        try:
            process.start()
            return
        except (EOFError, OSError):
            if attempt == START_ATTEMPTS - 1:
                raise
            time.sleep(WAIT_SECONDS)


class ParallelExecutor(LocalExecutor):
    """The executor of runs side by side.

    Every run has as many devices as its plan needs, close to each other, with the cores near them; on a CPU every run
    has an equal set of cores.
    """

    def __init__(self, parallel: int | str, models: Sequence[ModelConfig], display: ProgressDisplay) -> None:
        super().__init__(models, display)
        self.cores = usable_cores()
        self.parallel = parallel
        self.slots: list[WorkerSlot] = []
        self.machines: dict[ClusterConfig, Machine] = {}
        self.placement = DevicePlacement()  # of the CUDA devices; empty on a CPU
        self.previous_handlers = {number: signal.getsignal(number) for number in HANDLED}
        set_signal_handlers(raise_interrupt)

    @property
    def max_parallel(self) -> int:
        """The number of runs that can run at the same time."""
        return (len(self.placement.device_ids) or 1) if self.parallel == "auto" else int(self.parallel)

    def core_sets(self) -> list[tuple[int, ...]]:
        """Return the cores divided equally among the runs on a CPU."""
        parts = 1 if self.parallel == "auto" else int(self.parallel)
        size = len(self.cores) // parts
        return [tuple(self.cores[index * size : (index + 1) * size]) for index in range(parts)]

    def machine(self, cluster: ClusterConfig) -> Machine:
        """Return a run's share of the machine on a CPU; on GPUs the whole machine, some of whose devices a run uses.

        Raises UserError if there are fewer cores than runs side by side, or devices of several models.
        """
        if cluster not in self.machines:
            machine = super().machine(cluster)
            if machine.device == "cuda":
                problem = machine.device_problem(machine.devices)
                if problem:
                    raise UserError(f"sweep.parallel={self.parallel}: {problem}")
                self.placement = place_devices(machine.devices, self.cores)
            elif self.parallel != "auto" and int(self.parallel) > len(self.cores):
                rule = f"is more than the {len(self.cores)} cores: choose fewer"
                raise UserError(f"sweep.parallel={self.parallel} {rule}")
            else:
                sets = self.core_sets()
                machine = replace(machine, cores=len(sets[0]), sharing=len(sets))
            self.machines[cluster] = machine
        return self.machines[cluster]

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether enough devices and cores are free for the run."""
        return self.free_devices_and_cores(run) is not None

    def free_devices_and_cores(self, run: QueuedRun) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
        """Return free devices and cores for the run, None while there are not enough."""
        busy = [slot for slot in self.slots if slot.run is not None]
        if self.parallel != "auto" and len(busy) >= int(self.parallel):
            return None
        device_ids = self.placement.device_ids
        if not device_ids:
            busy_cores = {slot.cores for slot in busy}
            free_sets = [cores for cores in self.core_sets() if cores not in busy_cores]
            return ((), free_sets[0]) if free_sets else None
        used = {device for slot in busy for device in slot.devices}
        free = [index for index, device in enumerate(device_ids) if device not in used]
        wanted = min(run.planned.devices, len(device_ids))  # its plan refuses a run that needs more
        if len(free) < wanted:
            return None
        chosen = self.placement.closest(free, wanted)
        cores = {core for index in chosen for core in self.placement.cores[index]}
        return tuple(device_ids[index] for index in chosen), tuple(sorted(cores))

    def start(self, run: QueuedRun) -> None:
        """Send the run to an idle worker process, or to a new one."""
        resources = self.free_devices_and_cores(run)
        assert resources is not None
        work = (run.planned, *resources)
        slot = next((slot for slot in list(self.slots) if slot.run is None and self.send_work(slot, work)), None)
        if slot is None:
            slot = self.start_worker()
            slot.pipe.send(work)
        slot.run, (slot.devices, slot.cores) = run, resources

    def send_work(self, slot: WorkerSlot, work: tuple[object, ...]) -> bool:
        """Send work to an idle worker process. Return False, and forget the worker, if it has died."""
        try:
            slot.pipe.send(work)
        except OSError:
            self.forget(slot)
            return False
        return True

    def forget(self, slot: WorkerSlot) -> None:
        """Drop a worker that has died."""
        slot.process.join()
        self.slots.remove(slot)

    def start_worker(self) -> WorkerSlot:
        """Start a worker process from a fork server: its state is that of a new command, and it ends with this one."""
        start_forkserver("cuda", FORKSERVER)
        context = multiprocessing.get_context("forkserver")
        executor_end, worker_end = context.Pipe()
        process = context.Process(target=worker_loop, args=(worker_end, list(self.models)))
        start_process(process)
        worker_end.close()
        self.slots.append(WorkerSlot(process, executor_end))
        return self.slots[-1]

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        """Return the runs that ended, after a short wait for messages of the workers."""
        self.display.show()
        busy = {slot.pipe: slot for slot in self.slots if slot.run is not None}
        ready = [pipe for pipe in wait(list(busy), WAIT_SECONDS) if isinstance(pipe, Connection)]
        ended = [self.receive(busy[pipe]) for pipe in ready]
        return [entry for entry in ended if entry is not None]

    def receive(self, slot: WorkerSlot) -> tuple[QueuedRun, Record | None] | None:
        """Handle a message of a worker; return its run and record if that is the message, or if the worker died."""
        run = slot.run
        assert run is not None
        try:
            kind, value = slot.pipe.recv()
        except (EOFError, OSError):
            self.forget(slot)
            return run, record_of_killed_worker(run, slot.process.exitcode)
        if kind == "folder":
            self.display.update(run, value)
        elif kind == "log":
            self.display.print_line(value)
        elif kind == "raised":
            raise value
        else:
            slot.run = None
            return run, value
        return None

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """End the runs in progress, and return the records that they write within END_SECONDS."""
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
        for slot in self.slots:
            if slot.run is not None and slot.process.pid:
                slot.process.terminate()
        deadline = time.monotonic() + END_SECONDS
        ended: list[tuple[QueuedRun, Record]] = []
        while any(slot.run for slot in self.slots) and time.monotonic() < deadline:
            ended += [(run, record) for run, record in self.poll() if record is not None]
        return ended

    def close(self) -> None:
        """End the worker processes and restore the signal handlers."""
        for slot in self.slots:
            slot.process.kill()
            slot.process.join()
            slot.pipe.close()
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)


def record_of_killed_worker(run: QueuedRun, exit_code: int) -> Record | None:
    """Return the record of a run whose worker process was killed; None if another command works on it by now."""
    end = signal.Signals(-exit_code).name if exit_code < 0 else f"code {exit_code}"
    ending: Cells = {"status": "error", "reason": f"the process that ran it ended with {end}"}
    folder = run.planned.folder
    with run_lock(folder.lock, wait=False) as is_acquired:
        if not is_acquired:
            return None
        return reusable_record(run.config, run.command, folder, lambda _: None) or write_row(run.planned, ending)
