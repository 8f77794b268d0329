"""NVIDIA's management library (NVML): what it reports of CUDA devices. No other module imports pynvml.

NVML refuses many queries on virtual devices and on those partitioned by MIG: a refused query returns None here.
"""

import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

# The variables that name the visible devices. Where both are set, ROCm's is the one that counts.
VISIBLE_DEVICES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

CORES_PER_WORD = 64  # of NVML's set of cores

# Why clocks are below their maximum, by NVML's name of the bit.
THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power limit",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware",
}

# What connects two devices without NVLink, by NVML's name of the level, fastest first.
CONNECTIONS = {
    "NVML_TOPOLOGY_INTERNAL": "board",
    "NVML_TOPOLOGY_SINGLE": "PCIe switch",
    "NVML_TOPOLOGY_MULTIPLE": "PCIe switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PCIe host bridge",
    "NVML_TOPOLOGY_NODE": "NUMA node",
    "NVML_TOPOLOGY_SYSTEM": "between NUMA nodes",
}


class NvmlError(RuntimeError):
    """NVML cannot be used, or does not know a device."""


@cache
def library() -> Any:
    """Return pynvml, which is imported once something is asked of it."""
    return importlib.import_module("pynvml")


def query(name: str, convert: Callable[[Any], T], *arguments: Any) -> T | None:
    """Return the converted answer of one of NVML's functions, None if NVML refuses."""
    try:
        return convert(getattr(library(), name)(*arguments))
    except library().NVMLError:
        return None


@dataclass(frozen=True)
class NvmlDevice:
    """One CUDA device as NVML knows it."""

    handle: Any  # pynvml's c_nvmlDevice_t

    def query(self, name: str, convert: Callable[[Any], T], *arguments: Any) -> T | None:
        """Return the converted answer of one of NVML's functions about this device, None if NVML refuses."""
        return query(f"nvmlDeviceGet{name}", convert, self.handle, *arguments)

    def name(self) -> str | None:
        """Return the device's name, such as NVIDIA H200."""
        return self.query("Name", str)

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the free and the total bytes; None for a device that shares the host's memory, and where refused."""
        return self.query("MemoryInfo", lambda memory: (int(memory.free), int(memory.total)))

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the major and minor number of the device's generation, such as (9, 0)."""
        return self.query("CudaComputeCapability", lambda numbers: (numbers[0], numbers[1]))

    def near_cores(self, highest: int) -> set[int] | None:
        """Return the cores of the NUMA node that the device is attached to, of those up to number `highest`."""

        def cores(words: Sequence[int]) -> set[int]:
            bits = sum(int(word) << (CORES_PER_WORD * index) for index, word in enumerate(words))
            return {core for core in range(highest + 1) if bits >> core & 1}

        return self.query("CpuAffinity", cores, highest // CORES_PER_WORD + 1)

    def power_limit_watts(self) -> float | None:
        """Return the power that the device may draw."""
        return self.query("PowerManagementLimit", lambda milliwatts: float(milliwatts / 1000))

    def energy_millijoules(self) -> int | None:
        """Return the energy consumed since the driver was loaded. The counter moves every few tens of milliseconds."""
        return self.query("TotalEnergyConsumption", int)

    def throttle_reasons(self) -> set[str] | None:
        """Return why the clocks are below their maximum now, except for idleness and the user's own settings."""
        bits = self.query("CurrentClocksEventReasons", int)
        if bits is None:  # drivers before 535 know only the older name
            bits = self.query("CurrentClocksThrottleReasons", int)
        if bits is None:
            return None
        return {reason for name, reason in THROTTLE_REASONS.items() if bits & getattr(library(), name)}

    def process_ids(self) -> set[int] | None:
        """Return the processes that compute on the device now."""
        return self.query("ComputeRunningProcesses", lambda processes: {process.pid for process in processes})

    def process_bytes(self) -> dict[int, int | None] | None:
        """Return the processes that compute on the device now, with the memory that each of them has there."""
        return self.query(
            "ComputeRunningProcesses", lambda processes: {process.pid: process.usedGpuMemory for process in processes}
        )

    def is_partitioned(self) -> bool:
        """Return whether MIG partitions the device, so that NVML cannot attribute what it reports to a part."""
        return bool(self.query("MigMode", lambda mode: mode[0]))

    def connection_to(self, other: "NvmlDevice") -> str | None:
        """Return what connects this device to another, or '-' to itself."""
        if self is other:
            return "-"
        status = self.query("P2PStatus", int, other.handle, library().NVML_P2P_CAPS_INDEX_NVLINK)
        if status == library().NVML_P2P_STATUS_OK:
            return "NVLink"
        level = self.query("TopologyCommonAncestor", int, other.handle)
        return next((words for name, words in CONNECTIONS.items() if getattr(library(), name) == level), None)


def visible_device_ids(count: int) -> list[str]:
    """Return the numbers or UUIDs by which the environment names the visible devices, else the first `count` numbers.

    NVML's numbers are those of CUDA_DEVICE_ORDER=PCI_BUS_ID, which all processes of the harness have.
    """
    visible = next((os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name)), None)
    if visible is None:
        return [str(index) for index in range(count)]
    return [entry.strip() for entry in visible.split(",")][:count]


def visible_devices(count: int) -> list[NvmlDevice]:
    """Return the visible devices in CUDA's order. Raise NvmlError if NVML does not start or does not know one."""
    try:
        library().nvmlInit()
        return [NvmlDevice(_handle_of(device_id)) for device_id in visible_device_ids(count)]
    except library().NVMLError as error:
        raise NvmlError(str(error)) from None


def devices_by_uuid(uuids: Sequence[str]) -> list[NvmlDevice] | None:
    """Return the devices of these UUIDs (GPU-…), or None if NVML does not know one of them."""
    query("nvmlInit", bool)
    devices = [query("nvmlDeviceGetHandleByUUID", NvmlDevice, uuid) for uuid in uuids]
    return None if None in devices else [device for device in devices if device]


def driver_version() -> str | None:
    """Return the driver's version."""
    return query("nvmlSystemGetDriverVersion", str)


def _handle_of(device_id: str) -> Any:
    """Return NVML's handle of a number, or of a UUID that may be cut short, as CUDA takes both."""
    pynvml = library()
    number = re.match(r"\+?(\d+)", device_id)  # CUDA reads a number as C does: up to the first other character
    if number:
        return pynvml.nvmlDeviceGetHandleByIndex(int(number[1]))
    if device_id.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(device_id)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    matching = [handle for handle in handles if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(device_id)]
    if len(matching) != 1:
        raise NvmlError(f"{len(matching)} devices have a UUID that begins with {device_id}")
    return matching[0]
