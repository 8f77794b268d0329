"""What a figure was measured in: enough to say why two tables differ, and nothing secret."""

import functools
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.hardware.machine import Machine
from harness.hardware.nvml import nvml_handle, nvml_or_none, visible_devices

# Settings of the libraries and of the launcher that change speed or numerics.
PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUDNN_", "CUBLAS_", "TRITON_", "DS_"),
)

VARIABLES = (
    *("CXX", "CXXFLAGS", "LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE"),
    # Of Slurm, what it gives and where it binds; its job numbers differ always, and it knows users and tokens.
    *("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE"),
    *("SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_MEM_PER_NODE", "SLURM_JOB_PARTITION"),
)

# Whatever has one of these in its name or its value is left out; better a setting less than a secret more.
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|PWD|AUTH|CREDENTIAL|COOKIE|JWT|BEARER", re.IGNORECASE)

_URL_WITH_MORE = re.compile(r"//[^/\s]*@|://\S*\?")  # user:password@host, or a query

# Beside versions.py, by their names in a package index.
PACKAGES = {"numpy": "numpy", "hydra": "hydra-core", "wandb": "wandb", "transformers": "transformers"}

PACKAGES |= {"triton": "triton"}

_CPUINFO = Path("/proc/cpuinfo")

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def collect_environment(
    machine: Machine, threads: int | None = None, given: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Plain values, None where unknown. What cannot change within a process is looked up once.

    threads: of each rank, where known; given: the variables that ranks find beside this process's. Nothing here touches
    a device: torch says what it was built for, NVML the rest.
    """
    return {
        "device": machine.device,
        "device_name": machine.device_name,
        "devices": machine.devices,
        "cores": machine.cores,
        "threads": threads,
        **_host(),
        **_software(),
        **_devices(machine.devices),
        "compiler": _compiler(os.environ.get("CXX", "")),
        "variables": variables(os.environ | (given or {}), _homes()),
    }


def variables(names: Mapping[str, str], homes: tuple[str, ...]) -> dict[str, str]:
    """Those of an environment that change a measurement, without secrets; the given folders become ~."""
    chosen = {name: names[name] for name in sorted(names) if name.startswith(PREFIXES) or name in VARIABLES}
    return {
        name: _without_home(value, homes)
        for name, value in chosen.items()
        if not (_SECRET.search(name) or _SECRET.search(value) or _URL_WITH_MORE.search(value))
    }


def _without_home(value: str, homes: tuple[str, ...]) -> str:
    """A home is one only as a whole name, at the beginning of a path: /home/me is not in /home/mel or /mnt/home/me."""
    for home in homes:
        value = re.sub(rf"(?:(?<![\w./~-])|(?<=-[IL])){re.escape(home)}(?![\w.-])", "~", value)
    return value


@functools.cache
def _homes() -> tuple[str, ...]:
    """As the environment says, and where its links lead; longest first. Empty for a user without a home."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (the other raises for a user without one)
    homes = {str(home), str(home.resolve())} - {"/", "~"}
    return tuple(sorted(homes, key=len, reverse=True))


@functools.cache
def _host() -> dict[str, Any]:
    return {
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "physical_cores": psutil.cpu_count(logical=False),
        "frequency_governor": _GOVERNOR.read_text().strip() if os.access(_GOVERNOR, os.R_OK) else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }


def _processor() -> str | None:
    """The model's name. Some architectures have none in Linux's list."""
    if platform.system() == "Darwin":
        return _first_line(["sysctl", "-n", "machdep.cpu.brand_string"])
    if _CPUINFO.exists():
        with _CPUINFO.open(errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or None


@functools.cache
def _software() -> dict[str, str | None]:
    """Versions that no package of versions.py tells; CUDA's are those torch was built for or brings along."""
    try:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # torch refuses the library it finds
        cudnn = None
    # A build without NCCL has not the function that says its version.
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
def _compiler(named: str) -> str | None:
    """What CXX, or c++, says it is."""
    try:
        command = shlex.split(named) or ["c++"]
    except ValueError:  # an open quotation
        return None
    return _first_line([*command, "--version"])


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


@functools.cache
def _devices(count: int) -> dict[str, Any]:
    """The driver, and of every visible device its name and the watts it may draw; how they are connected."""
    unknown = dict.fromkeys(("driver", "device_names", "power_limits_watts", "topology"))
    if not count:
        return unknown
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [nvml_handle(pynvml, entry) for entry in visible_devices(count)]
        known = {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "device_names": [pynvml.nvmlDeviceGetName(handle) for handle in handles],
        }
    except pynvml.NVMLError:
        return unknown
    milliwatts = [nvml_or_none(pynvml.nvmlDeviceGetPowerManagementLimit, handle) for handle in handles]
    return known | {
        "power_limits_watts": [None if limit is None else limit / 1000 for limit in milliwatts],
        "topology": _topology(pynvml, handles) if count > 1 else None,
    }


def _topology(pynvml: Any, handles: list[Any]) -> list[list[str | None]]:
    """The way from each device (row) to each other (column), in words; `-` to itself."""
    nearest = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "board",
        pynvml.NVML_TOPOLOGY_SINGLE: "PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "NUMA node",
        pynvml.NVML_TOPOLOGY_SYSTEM: "between NUMA nodes",
    }

    def way(one: Any, other: Any) -> str | None:
        if one is other:
            return "-"
        linked = nvml_or_none(pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if linked == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return nearest.get(nvml_or_none(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other))

    return [[way(one, other) for other in handles] for one in handles]
