"""What a figure was measured in: enough to say why two tables differ, and nothing secret."""

import os
import platform
from typing import Any

import psutil

from harness.machine import Machine

# Settings of the libraries that change speed or numerics; named one by one, so that no secret is ever copied.
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "CXX")


def environment(machine: Machine) -> dict[str, Any]:
    return {
        "device": machine.device,
        "device_name": machine.device_name,
        "devices": machine.devices,
        "cores": machine.cores,
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
