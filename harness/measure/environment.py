"""A run's software and hardware environment: enough to explain why two tables differ, and nothing secret."""

import functools
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

from harness.hardware.machine import Machine, processor_name
from harness.hardware.nvml import NvmlError, driver_version, visible_device_ids, visible_devices
from harness.util.files import JsonObject
from harness.util.redact import may_hold_secret

# Prefixes of variables of libraries and of the launcher that change speed or numerics.
PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUDNN_", "CUBLAS_", "TRITON_", "DS_"),
)

VARIABLES = (
    *("CXX", "CXXFLAGS", "LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE"),
    # Only Slurm's variables of resources and binding are listed: job ids always differ, others name users and tokens.
    *("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE"),
    *("SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_MEM_PER_NODE", "SLURM_JOB_PARTITION"),
)

# Of these, those of torch's allocator, NCCL and TF32, which are set for one command and change what it measures.
SETTINGS = ("NCCL_", "TORCH_NCCL_", "PYTORCH_", "NVIDIA_TF32_OVERRIDE")

# Packages whose versions are recorded here beside those in records/provenance.py: field of the record -> package.
PACKAGES = {
    "numpy": "numpy",
    "hydra": "hydra-core",
    "wandb": "wandb",
    "transformers": "transformers",
    "triton": "triton",
}


_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def collect_environment(
    machine: Machine, threads: int | None = None, rank_variables: Mapping[str, str] | None = None
) -> JsonObject:
    """Return the environment in plain values, None if unknown. Values that a process cannot change are read once.

    `threads` is the number of threads of each rank, if known. `rank_variables` are the environment variables that ranks
    have beside this process's. No device is initialized: torch reports what it was built for, and NVML the rest.
    """
    return {
        "device": machine.device,
        "device_name": machine.device_name,
        "devices": machine.devices,
        "cores": machine.cores,
        "threads": threads,
        **_host(),
        **_software(),
        **_devices(tuple(visible_device_ids(machine.devices))),
        "compiler": _compiler(os.environ.get("CXX", "")),
        "variables": relevant_variables(os.environ | (rank_variables or {}), _homes()),
    }


def relevant_variables(names: Mapping[str, str], homes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that change a measurement, without secrets; the home folders become ~."""
    chosen = {name: names[name] for name in sorted(names) if name.startswith(PREFIXES) or name in VARIABLES}
    return {name: _without_home(value, homes) for name, value in chosen.items() if not may_hold_secret(name, value)}


def changed_settings(recorded: Mapping[str, str]) -> list[str]:
    """Return the names of SETTINGS whose values differ from those that a record has."""
    present = relevant_variables(os.environ, _homes())
    names = sorted(name for name in {*recorded, *present} if name.startswith(SETTINGS))
    return [name for name in names if recorded.get(name) != present.get(name)]


def _without_home(value: str, homes: tuple[str, ...]) -> str:
    """Replace home folders only where they are whole names that start a path: /home/me is not in /home/mel."""
    for home in homes:
        value = re.sub(rf"(?:(?<![\w./~-])|(?<=-[IL])){re.escape(home)}(?![\w.-])", "~", value)
    return value


@functools.cache
def _homes() -> tuple[str, ...]:
    """Return the home folder as the environment names it and with links resolved, longest first; empty without one."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home() raises for a user without a home)
    homes = {str(home), str(home.resolve())} - {"/", "~"}
    return tuple(sorted(homes, key=len, reverse=True))


@functools.cache
def _host() -> JsonObject:
    """Return the facts about the machine's host, beside those that harness.hardware.machine knows."""
    import torch  # here, as a command that finds a record again needs none

    return {
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor_name(),
        "physical_cores": psutil.cpu_count(logical=False),
        "frequency_governor": _GOVERNOR.read_text().strip() if os.access(_GOVERNOR, os.R_OK) else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }


@functools.cache
def _software() -> dict[str, str | None]:
    """Return versions that records/provenance.py does not record; CUDA's are those of torch's build."""
    import torch

    try:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # torch rejects the library that is installed
        cudnn = None
    # A build without NCCL lacks the function that returns its version.
    nccl = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else None  # type: ignore[no-untyped-call]
    return {
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        **{name: _version(package) for name, package in PACKAGES.items()},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _compiler(cxx: str) -> str | None:
    """Return the first line of the version that the compiler in `cxx`, or else c++, prints."""
    try:
        command = shlex.split(cxx) or ["c++"]
    except ValueError:  # an unclosed quotation
        return None
    return _first_line([*command, "--version"])


def _first_line(command: list[str]) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.splitlines()), None)


@functools.cache
def _devices(device_ids: tuple[str, ...]) -> JsonObject:
    """Return the driver's version, and every visible device's name, power limit in watts and connections to the others.

    The topology has a row for each device. All are None if one is unknown or there is no GPU. They are read once for
    the same devices: runs side by side in a sweep use different ones.
    """
    unknown: JsonObject = dict.fromkeys(("driver", "device_names", "power_limits_watts", "topology"))
    if not device_ids:
        return unknown
    try:
        devices = visible_devices(len(device_ids))
    except NvmlError:
        return unknown
    driver = driver_version()
    names = [name for device in devices if (name := device.name()) is not None]
    if driver is None or len(names) < len(devices):
        return unknown
    connections = [[device.connection_to(other) for other in devices] for device in devices]
    return {
        "driver": driver,
        "device_names": names,
        "power_limits_watts": [device.power_limit_watts() for device in devices],
        "topology": connections if len(devices) > 1 else None,
    }
