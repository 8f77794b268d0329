"""The executor that makes runs side by side on one machine, each in a process with devices or cores of its own."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.config.model import ModelConfig
from harness.config.schema import ClusterConfig
from harness.hardware.device_placement import DevicePlacement, closest_devices, place_devices
from harness.hardware.machine import Machine, usable_cores
from harness.hardware.nvml import VISIBLE_DEVICES
from harness.launcher.forkserver import start_forkserver
from harness.launcher.outcome import OUTSIDE_SIGNALS
from harness.launcher.rank_entry import die_with
from harness.launcher.signals import HANDLED, restored_handlers, set_handlers
from harness.records.schema import Cells, Record
from harness.records.store import read_record
from harness.runner.launch_run import RunContext, write_row
from harness.runner.reuse import reusable_record
from harness.runner.run import execute
from harness.sweep.display import ProgressDisplay
from harness.sweep.queued_run import Ended, QueuedRun
from harness.sweep.scheduler import LocalExecutor
from harness.util.locks import file_lock
from harness.util.text import UserError

WAIT_SECONDS = 0.2  # for messages of workers, and between attempts to start one

START_ATTEMPTS = 5

END_SECONDS = 15.0  # for interrupted runs to write their records


@dataclass
class WorkerSlot:
    """A worker process that makes one run at a time, and what its run may use."""

    process: Any
    pipe: Connection
    run: QueuedRun | None = None  # None: the worker is idle
    places: Sequence[int] = ()  # of the executor's placement


class ParallelExecutor(LocalExecutor):
    """The executor of runs side by side.

    Every run has as many devices as its plan needs, close to each other, with the cores near them; on a CPU every run
    has an equal set of cores.
    """

    def __init__(self, parallel: int | str, models: Sequence[ModelConfig], display: ProgressDisplay) -> None:
        super().__init__(models, display)
        self.cores = usable_cores()
        self.parallel, self.most = parallel, None if parallel == "auto" else int(parallel)
        self.slots: list[WorkerSlot] = []
        self.machines: dict[ClusterConfig, Machine] = {}
        self.placement = DevicePlacement()  # of the CUDA devices; on a CPU it has sets of cores alone

    @property
    def max_parallel(self) -> int:
        """The number of runs that can run at the same time."""
        return self.most or len(self.placement.device_ids) or 1

    def machine(self, cluster: ClusterConfig) -> Machine:
        """Return a run's share of the machine on a CPU; on GPUs the whole machine, some of whose devices a run uses.

        Raises UserError if there are fewer cores than runs side by side, or devices of several models.
        """
        if cluster not in self.machines:
            machine = super().machine(cluster)
            problem = machine.device_problem(machine.devices)
            if problem:
                raise UserError(f"sweep.parallel={self.parallel}: {problem}")
            if machine.device == "cuda":
                self.placement = place_devices(machine.devices, self.cores)
            else:
                machine = self.share_cores(machine)
            self.machines[cluster] = machine
        return self.machines[cluster]

    def share_cores(self, machine: Machine) -> Machine:
        """Return a run's share of the machine, whose cores are divided equally. Raises UserError if there are too few.

        Where some runs of the command are on GPUs, those on the CPU are placed like them.
        """
        parts = self.most or 1
        size = len(self.cores) // parts
        if size == 0:
            rule = f"is more than the {len(self.cores)} cores: choose fewer"
            raise UserError(f"sweep.parallel={self.parallel} {rule}")
        if not self.placement.device_ids:
            sets = (self.cores[index * size : (index + 1) * size] for index in range(parts))
            self.placement = DevicePlacement(cores=tuple(map(tuple, sets)))
        return replace(machine, cores=size, sharing=parts)

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether enough devices and cores are free for the run."""
        return bool(self.free_places(run))

    def free_places(self, run: QueuedRun) -> Sequence[int]:
        """Return the places, each a device or a set of cores, that the run can use now; none while too few are free."""
        busy = [slot for slot in self.slots if slot.run is not None]
        used = {place for slot in busy for place in slot.places}
        free = [place for place in range(len(self.placement.cores)) if place not in used]
        # The plan of a run that needs more devices than there are refuses it.
        wanted = min(run.planned.devices, len(self.placement.device_ids)) or 1
        if len(busy) == self.most or len(free) < wanted:
            return ()
        return closest_devices(self.placement.connections, tuple(free), wanted)

    def start(self, run: QueuedRun) -> None:
        """Send the run to an idle worker process, or to a new one."""
        places = self.free_places(run)
        devices = [device for place, device in enumerate(self.placement.device_ids) if place in places]
        work = (run.planned, devices, {core for place in places for core in self.placement.cores[place]})
        slot = next((slot for slot in list(self.slots) if slot.run is None and self.send_work(slot, work)), None)
        if slot is None:
            slot = self.start_worker()
            slot.pipe.send(work)
        slot.run, slot.places = run, places

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
        start_forkserver("cuda")
        context = multiprocessing.get_context("forkserver")
        executor_end, worker_end = context.Pipe()
        process = context.Process(target=worker_loop, args=(worker_end, list(self.models)))
        start_process(process)
        worker_end.close()
        self.slots.append(WorkerSlot(process, executor_end))
        return self.slots[-1]

    def poll(self) -> Ended:
        """Return the runs that ended, after a short wait for messages of the workers."""
        self.display.show()
        busy = {slot.pipe: slot for slot in self.slots if slot.run is not None}
        ready = [pipe for pipe in wait(list(busy), WAIT_SECONDS) if isinstance(pipe, Connection)]
        return [entry for pipe in ready for entry in self.receive(busy[pipe])]

    def receive(self, slot: WorkerSlot) -> Ended:
        """Handle a message of a worker; return its run and record if that is the message, or if the worker died."""
        run = slot.run
        assert run is not None
        try:
            kind, value = slot.pipe.recv()
        except (EOFError, OSError):
            self.forget(slot)
            return [(run, record_of_killed_worker(run, slot.process.exitcode))]
        if kind == "folder":
            self.display.update(run, value)
        elif kind == "log":
            self.display.print_line(value)
        elif kind == "raised":
            raise value
        else:
            slot.run = None
            return [(run, value)]
        return []

    def interrupt(self) -> Ended:
        """End the runs in progress, and return them with the records that they write within END_SECONDS."""
        for slot in self.slots:
            if slot.run is not None and slot.process.pid:
                slot.process.terminate()
        deadline = time.monotonic() + END_SECONDS
        ended: Ended = []
        with restored_handlers():
            for number in HANDLED:
                signal.signal(number, signal.SIG_IGN)
            while any(slot.run for slot in self.slots) and time.monotonic() < deadline:
                ended += self.poll()
        return ended

    def close(self) -> None:
        """End the worker processes."""
        for slot in self.slots:
            slot.process.kill()
            slot.process.join()
            slot.pipe.close()


def record_of_killed_worker(run: QueuedRun, exit_code: int) -> Record | None:
    """Return the record of a run whose worker process was killed; None if another command works on it by now."""
    end = signal.Signals(-exit_code).name if exit_code < 0 else f"code {exit_code}"
    reason = f"the process that ran it ended with {end}"
    ending: Cells = {"status": "error", "reason": reason, "ended_from_outside": end in OUTSIDE_SIGNALS or None}
    folder = run.planned.folder
    with file_lock(folder.lock, wait=False) as is_acquired:
        if not is_acquired:
            return None
        record = reusable_record(run.command, folder)
        with suppress(UserError):
            row = read_record(folder.path).row
            ending |= {key: row[key] for key in ("attempts", "earlier_ends") if key in row}
        return record or write_row(run.planned, ending)


def start_process(process: Any) -> None:
    """Start a process. If the server that forks it was killed, try again: multiprocessing then starts another."""
    for _ in range(START_ATTEMPTS - 1):
        with suppress(EOFError, OSError):
            process.start()
            return
        time.sleep(WAIT_SECONDS)
    process.start()


def worker_loop(pipe: Connection, models: list[ModelConfig]) -> None:
    """Make the runs that come through the pipe, until the command closes it or dies; runs in the worker process.

    The folder that a run's ranks write to, log lines and the record go into the pipe. A signal while ranks run ends
    them, and the run gets its record.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=die_with, args=(parent.sentinel,), daemon=True).start()
    set_handlers()
    while True:
        try:
            plan, devices, cores = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if devices:
            os.environ.update(dict.fromkeys(VISIBLE_DEVICES, ",".join(devices)))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        send_folder = functools.lru_cache(maxsize=1)(lambda folder: pipe.send(("folder", folder)))  # when it changes
        context = RunContext(models=models, on_progress=send_folder, log=lambda line: pipe.send(("log", line)))
        try:
            pipe.send(("done", execute(plan, context)))
        except KeyboardInterrupt:  # before ranks were started, or after they ended
            pipe.send(("done", None))
        except (OSError, UserError) as error:
            pipe.send(("raised", error))
