"""NVIDIA's management library (NVML): what it reports of CUDA devices. No other module imports pynvml.

NVML refuses many queries on virtual devices and on those partitioned by MIG: a refused query returns None here.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# The variables that name the visible devices. Where both are set, ROCm's is the one that counts.
VISIBLE_DEVICES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

CORES_PER_WORD = 64  # of NVML's set of cores


class NvmlError(RuntimeError):
    """NVML cannot be used, or does not know a device."""


@dataclass(frozen=True)
class NvmlDevice:
    """One CUDA device as NVML knows it."""

    handle: Any  # pynvml's c_nvmlDevice_t

    def name(self) -> str | None:
        """Return the device's name, such as NVIDIA H200."""
        import pynvml

        name = _query(pynvml.nvmlDeviceGetName, self.handle)
        return None if name is None else str(name)

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the free and the total bytes; None for a device that shares the host's memory, and where refused."""
        import pynvml

        memory = _query(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        return None if memory is None else (int(memory.free), int(memory.total))

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the major and minor number of the device's generation, such as (9, 0)."""
        import pynvml

        numbers: tuple[int, int] | None = _query(pynvml.nvmlDeviceGetCudaComputeCapability, self.handle)
        return numbers

    def near_cores(self, highest: int) -> set[int] | None:
        """Return the cores of the NUMA node that the device is attached to, of those up to number `highest`."""
        import pynvml

        words = _query(pynvml.nvmlDeviceGetCpuAffinity, self.handle, highest // CORES_PER_WORD + 1)
        if words is None:
            return None
        bits = sum(int(word) << (CORES_PER_WORD * index) for index, word in enumerate(words))
        return {core for core in range(highest + 1) if bits >> core & 1}

    def power_limit_watts(self) -> float | None:
        """Return the power that the device may draw."""
        import pynvml

        milliwatts = _query(pynvml.nvmlDeviceGetPowerManagementLimit, self.handle)
        return None if milliwatts is None else milliwatts / 1000

    def energy_millijoules(self) -> int | None:
        """Return the energy consumed since the driver was loaded. The counter moves every few tens of milliseconds."""
        import pynvml

        millijoules: int | None = _query(pynvml.nvmlDeviceGetTotalEnergyConsumption, self.handle)
        return millijoules

    def throttle_reasons(self) -> set[str] | None:
        """Return why the clocks are below their maximum now, except for idleness and the user's own settings."""
        import pynvml

        bits = _query(pynvml.nvmlDeviceGetCurrentClocksEventReasons, self.handle)
        if bits is None:  # drivers before 535 know only the older name
            bits = _query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self.handle)
        if bits is None:
            return None
        reasons = {
            pynvml.nvmlClocksThrottleReasonSwPowerCap: "power limit",
            pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
            pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat",
            pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
            pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware",
        }
        return {reason for bit, reason in reasons.items() if bits & bit}

    def process_ids(self) -> set[int] | None:
        """Return the processes that compute on the device now."""
        processes = self.process_bytes()
        return None if processes is None else set(processes)

    def process_bytes(self) -> dict[int, int | None] | None:
        """Return the processes that compute on the device now, with the memory that each of them has there."""
        import pynvml

        processes = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, self.handle)
        return None if processes is None else {process.pid: process.usedGpuMemory for process in processes}

    def is_partitioned(self) -> bool:
        """Return whether MIG partitions the device, so that NVML cannot attribute what it reports to a part."""
        import pynvml

        mode = _query(pynvml.nvmlDeviceGetMigMode, self.handle)
        return bool(mode is not None and mode[0])

    def connection_to(self, other: "NvmlDevice") -> str | None:
        """Return what connects this device to another, or '-' to itself."""
        import pynvml

        if self is other:
            return "-"
        status = _query(pynvml.nvmlDeviceGetP2PStatus, self.handle, other.handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        connections = {
            pynvml.NVML_TOPOLOGY_INTERNAL: "board",
            pynvml.NVML_TOPOLOGY_SINGLE: "PCIe switch",
            pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
            pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe host bridge",
            pynvml.NVML_TOPOLOGY_NODE: "NUMA node",
            pynvml.NVML_TOPOLOGY_SYSTEM: "between NUMA nodes",
        }
        return connections.get(_query(pynvml.nvmlDeviceGetTopologyCommonAncestor, self.handle, other.handle))


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
    import pynvml

    try:
        pynvml.nvmlInit()
        return [NvmlDevice(_handle_of(device_id)) for device_id in visible_device_ids(count)]
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from None


def devices_by_uuid(uuids: Sequence[str]) -> list[NvmlDevice] | None:
    """Return the devices of these UUIDs (GPU-…), or None if NVML does not know one of them."""
    import pynvml

    _query(pynvml.nvmlInit)
    handles = [_query(pynvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in uuids]
    return None if any(handle is None for handle in handles) else [NvmlDevice(handle) for handle in handles]


def driver_version() -> str | None:
    """Return the driver's version."""
    import pynvml

    version = _query(pynvml.nvmlSystemGetDriverVersion)
    return None if version is None else str(version)


def _handle_of(device_id: str) -> Any:
    """Return NVML's handle of a number, or of a UUID that may be cut short, as CUDA takes both."""
    import pynvml

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


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or None if NVML refuses."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
