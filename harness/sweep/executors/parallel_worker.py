"""The worker process of ParallelExecutor, which makes the runs that the command sends it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from harness.config.model import ModelConfig
from harness.hardware.nvml import VISIBLE_DEVICES
from harness.launcher.monitor import HANDLED
from harness.records.schema import Record
from harness.runner.launch_run import RunContext
from harness.runner.plan import RunPlan
from harness.runner.run import execute
from harness.util.errors import UserError


def raise_interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt; a signal handler."""
    raise KeyboardInterrupt


def set_signal_handlers(handler: Callable[..., None]) -> None:
    """Set the handler of the signals that end a command; one that is ignored, as nohup does, stays ignored."""
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def worker_loop(pipe: Connection, models: list[ModelConfig]) -> None:
    """Make the runs that come through the pipe, until the command closes it or dies; runs in the worker process.

    A signal while ranks run ends them, and the run gets its record.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=die_with, args=(parent.sentinel,), daemon=True).start()
    set_signal_handlers(raise_interrupt)
    while True:
        try:
            plan, devices, cores = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if devices:
            os.environ.update(dict.fromkeys(VISIBLE_DEVICES, ",".join(devices)))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        try:
            pipe.send(("done", execute_plan(plan, pipe, models)))
        except KeyboardInterrupt:  # before ranks were started, or after they ended
            pipe.send(("done", None))
        except (OSError, UserError) as error:
            pipe.send(("raised", error))


def execute_plan(plan: RunPlan, pipe: Connection, models: list[ModelConfig]) -> Record | None:
    """Make one run and return its record; the folder that its ranks write to and log lines go into the pipe."""
    sent_folder: Path | None = None

    def send_folder(folder: Path) -> None:
        nonlocal sent_folder
        if folder != sent_folder:
            sent_folder = folder
            pipe.send(("folder", folder))

    context = RunContext(models=models, on_progress=send_folder, log=lambda line: pipe.send(("log", line)))
    return execute(plan, context)


def die_with(sentinel: int) -> None:
    """Kill this process when the process of the sentinel ends."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
