"""The process that ranks are forked from."""

import multiprocessing.forkserver
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.config.schema import Device
from harness.launcher.rank_environment import rank_environment, temporary_environment


@dataclass(frozen=True)
class StartMethod:
    """The way rank processes are created: multiprocessing's method, and the modules that its forkserver imports."""

    method: str
    preload: tuple[str, ...]


# A CPU rank is forked from a process that has imported what every rank needs and has neither a thread nor a tensor. So
# a run of a sweep starts in a fraction of a second instead of the several seconds that the imports take.
# A CUDA rank is forked from a bare interpreter, which is as clean as spawn: on a GPU machine those imports may call the
# driver, after which a fork cannot use the devices. Unlike with spawn, ranks die with the parent from their first
# moment on.
FORKSERVER = StartMethod("forkserver", ("harness.launcher.parent_death",))

START_METHODS: Mapping[str, StartMethod] = {
    "cpu": StartMethod("forkserver", ("harness.launcher.parent_death", "harness.launcher.preload")),
    "cuda": FORKSERVER,
}


def start_forkserver(device: Device, start: StartMethod | None = None) -> None:
    """Start the forkserver unless it runs already, without waiting for its imports.

    It lives no longer than the thread that calls this (harness.launcher.parent_death): call it from the main thread.
    """
    start = start or START_METHODS[device]
    if start.method != "forkserver":
        return
    server: Any = multiprocessing.forkserver._forkserver  # there is one per process, and no public way to stop it
    if server._preload_modules != list(start.preload):
        server._stop()
        multiprocessing.set_forkserver_preload(list(start.preload))
    single_threaded = {"OPENBLAS_NUM_THREADS": "1"}  # otherwise numpy starts threads, which do not survive a fork
    with temporary_environment(rank_environment(device, 1) | single_threaded):
        multiprocessing.forkserver.ensure_running()
