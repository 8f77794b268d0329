"""The process that ranks are forked from."""

import multiprocessing.forkserver
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from harness.config.schema import Device
from harness.hardware.cuda_devices import DEVICE_ORDER
from harness.hardware.machine import usable_cores
from harness.hardware.nvml import VISIBLE_DEVICES
from harness.util.parent_death import PARENT_VARIABLE
from harness.util.text import UserError

MOST_OF_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes of a path to a socket, see unix(7)

# The modules that the forkserver imports. A rank is forked from a process that has imported what every rank needs and
# has neither a thread nor a tensor. So a run of a sweep starts in a fraction of a second instead of the several seconds
# that the imports take. On a GPU machine DeepSpeed's imports may call the driver, after which a fork cannot use the
# devices, so that CUDA ranks import it themselves. Unlike with spawn, ranks die with the parent from the first moment.
PRELOADS: Mapping[Device, Sequence[str]] = {
    "cpu": ("harness.launcher.parent_death", "harness.launcher.preload_cpu"),
    "cuda": ("harness.launcher.parent_death", "harness.launcher.preload"),
}

# What ranks import of libraries that only some runs need. A forkserver of CUDA ranks imports none: these may call the
# driver, too.
LIBRARIES = {name: f"harness.launcher.preload_{name}" for name in ("peft", "torchao", "transformers")}


def start_forkserver(device: Device, preload: Sequence[str] | None = None, libraries: Sequence[str] = ()) -> None:
    """Start the forkserver unless it runs already, without waiting for its imports.

    One without some of these libraries is replaced by one that also has those of earlier calls. It lives no longer than
    the thread that calls this (harness.launcher.parent_death): call it from the main thread.
    Raises UserError if the folder for temporary files has too long a path for the forkserver's socket.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MOST_OF_FOLDER:
        raise UserError(f"TMPDIR={folder} is too long a path for sockets: choose one of at most {MOST_OF_FOLDER} bytes")
    modules = list(PRELOADS[device] if preload is None else preload)
    server: Any = multiprocessing.forkserver._forkserver  # there is one per process, and no public way to stop it
    running = server._preload_modules
    if running[: len(modules)] == modules:
        modules = running
    if device == "cpu":
        modules = [*modules, *(LIBRARIES[name] for name in libraries if LIBRARIES[name] not in modules)]
    if running != modules:
        server._stop()
        multiprocessing.set_forkserver_preload(modules)
    single_threaded = {"OPENBLAS_NUM_THREADS": "1"}  # otherwise numpy starts threads, which do not survive a fork
    parent = {PARENT_VARIABLE: str(os.getpid())}
    with temporary_environment(rank_environment(device, 1) | single_threaded | parent):
        multiprocessing.forkserver.ensure_running()


def threads_per_rank(local_world_size: int) -> int:
    """Return the number of cores that this process may use, divided among the ranks of this machine; at least 1."""
    return max(1, len(usable_cores()) // local_world_size)


def rank_environment(device: Device, local_ranks: int) -> dict[str, str]:
    """Return the variables that every rank of this machine has beside torchrun's."""
    scripts = sysconfig.get_path("scripts")  # DeepSpeed looks for ninja on PATH when it builds an operator
    environment = {
        "OMP_NUM_THREADS": str(threads_per_rank(local_ranks)),
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
    }
    # Their values may differ from those that the forkserver has.
    environment |= {name: os.environ[name] for name in VISIBLE_DEVICES if name in os.environ}
    if device == "cuda":
        environment |= DEVICE_ORDER
    else:
        environment["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would choose mps on macOS
        # libgomp's threads spin 300000 times before they sleep, and so take cores that other processes wait for.
        environment["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "5000")
    return environment


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Add these values to os.environ, and restore all of os.environ afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
