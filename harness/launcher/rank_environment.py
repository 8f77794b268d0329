"""The environment variables of ranks."""

import os
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from harness.config.schema import Device
from harness.hardware.cuda_devices import DEVICE_ORDER
from harness.hardware.machine import usable_cores
from harness.hardware.nvml import VISIBLE_DEVICES


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
    for name in VISIBLE_DEVICES:
        if name in os.environ:  # its value may differ from the one that the forkserver has
            environment[name] = os.environ[name]
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
