"""NVIDIA's management library (NVML): what it reports of CUDA devices. No other module imports pynvml.

NVML refuses many queries on virtual devices and on those partitioned by MIG: a refused query returns None here.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


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

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total bytes. Raise NvmlError if they are unknown."""
        import pynvml

        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self.handle)
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from None
        return int(memory.free), int(memory.total)

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
        import pynvml

        processes = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, self.handle)
        return None if processes is None else {process.pid for process in processes}

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
    """Return the entries of CUDA_VISIBLE_DEVICES, or else the numbers of the first `count` devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def visible_devices(count: int) -> list[NvmlDevice]:
    """Return the visible devices in CUDA's order. Raise NvmlError if NVML does not start or does not know one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return [NvmlDevice(_handle_of(device_id.strip())) for device_id in visible_device_ids(count)]
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
    import pynvml

    if device_id.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(device_id))
    return pynvml.nvmlDeviceGetHandleByUUID(device_id)


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or None if NVML refuses."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
