"""The self-test's first steps: what is installed, which devices there are, and how CUDA's can be named."""

import os
import subprocess
import sys
from collections.abc import Sequence

from harness.config.byte_size import format_bytes
from harness.hardware.nvml import visible_device_ids
from harness.records.provenance import versions
from harness.records.schema import Record
from harness.selftest.bench import Bench, StepFailedError
from harness.util.native_build import compiler_problem
from harness.util.text import one_line

LIBRARIES = ("torch", "deepspeed", "accelerate")  # the libraries without which an engine is missing

_SHORT_UUID = 8  # hexadecimal digits of a UUID that CUDA_VISIBLE_DEVICES may be shortened to

_PROBE_SECONDS = 120.0  # the time limit of a process that looks at devices

# Processes of their own print what is asked of CUDA, because it reads its variables once per process.
_SEEN_DEVICES = """
from harness.config.schema import ClusterConfig
from harness.runner.local_machine import detect_machine
print(detect_machine(ClusterConfig("local", device="cuda")).devices)
"""

_UUID = """
import torch
print(torch.cuda.get_device_properties(0).uuid)
"""


def describe_environment(bench: Bench, records: Sequence[Record]) -> str:
    """Require the libraries of all engines, and on a CPU a compiler; return versions."""
    installed = versions()
    missing = [name for name in LIBRARIES if installed[name] is None]
    if missing:
        raise StepFailedError(f"not installed: {', '.join(missing)}; install the package with all that it depends on")
    problem = compiler_problem()
    if bench.machine.device == "cpu" and problem:
        raise StepFailedError(f"memory is not counted on a CPU: {problem}")
    environment = bench.environment
    words = [f"{name} {installed[name]}" for name in ("python", *LIBRARIES)]
    words += [f"{name} {environment[name]}" for name in ("cuda", "nccl", "driver") if environment.get(name)]
    return ", ".join([*words, str(environment.get("compiler") or problem or "a compiler of unknown version")])


def describe_devices(bench: Bench, records: Sequence[Record]) -> str:
    """Require that a CUDA device is seen under each of its names; return the devices and their memory."""
    machine = bench.machine
    free = format_bytes(min(machine.free_bytes))
    if machine.device == "cpu":
        return f"the processor, {machine.cores} cores, {free} of memory free"
    total = "" if machine.device_bytes is None else f" of {format_bytes(machine.device_bytes)}"
    names = _names_of_first_device(bench)
    for name in names:
        count = seen_devices(name)
        if count != 1:
            raise StepFailedError(f"with CUDA_VISIBLE_DEVICES={name} the harness sees {count} devices, and not 1")
    return f"{machine.devices} x {machine.device_name}, {free}{total} free, the first seen under {len(names)} names"


def _names_of_first_device(bench: Bench) -> list[str]:
    """Return the names that CUDA_VISIBLE_DEVICES may have for the first device: its number, and UUIDs where CUDA's are.

    ROCm has other UUIDs, and an instance of a device that MIG partitions has only its own.
    """
    first = visible_device_ids(1)[0].strip()
    if bench.environment.get("cuda") is None or first.startswith("MIG-"):
        return [first]
    uuid = f"GPU-{_probe(_UUID, {})}"
    return [first, uuid, uuid[: len("GPU-") + _SHORT_UUID]]


def seen_devices(visible: str) -> int:
    """Return how many CUDA devices the harness sees under this CUDA_VISIBLE_DEVICES. Raises StepFailedError."""
    return int(_probe(_SEEN_DEVICES, {"CUDA_VISIBLE_DEVICES": visible}))


def _probe(code: str, variables: dict[str, str]) -> str:
    """Return the last line that a Python process prints. Raises StepFailedError if it fails."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        setting = " ".join(f"{name}={value}" for name, value in variables.items()) or "the devices as they are"
        raise StepFailedError(f"with {setting}: {one_line(error.stderr[-500:])}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailedError(one_line(error)) from None
    return result.stdout.strip().rpartition("\n")[2]
