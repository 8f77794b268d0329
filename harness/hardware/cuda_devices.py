"""The CUDA devices that this process may use, determined without initializing one of them in this process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.hardware.nvml import NvmlDevice, NvmlError, visible_devices
from harness.util.text import UserError, format_bytes, one_line

# NVML numbers devices by their position on the bus; CUDA would number the fastest first.
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

QUERY_SECONDS = 120.0  # for a process to import torch and initialize every device

RELEASE_SECONDS = 30.0  # for the driver to release the memory of killed processes; 80 GB take several seconds

SLACK_BYTES = 256 * 2**20  # a difference of free memory that is no process's model

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device at this moment."""

    name: str
    free_bytes: int
    total_bytes: int
    compute_capability: tuple[int, int] | None  # None for AMD's devices, and where unknown


def find_cuda_devices(count: int, is_rocm: bool = False) -> list[CudaDevice]:
    """Return the visible devices, of which torch counts `count`; they may be fewer where MIG partitions one.

    NVML answers at once. Where it cannot (AMD's devices, a container without NVML, a device that shares the host's
    memory, a partitioned device that is not named by its instances), a short-lived process asks CUDA itself. Raises
    UserError if CUDA does not answer either.
    """
    try:
        if is_rocm:
            raise NvmlError("NVML knows no AMD devices")
        return [_describe(device) for device in visible_devices(count)]
    except NvmlError as error:
        try:
            return query_cuda()
        except RuntimeError as second:
            raise UserError(
                f"torch counts {count} CUDA devices, but NVML reports: {error}; and CUDA reports: {second}."
                " cluster.device=cpu runs without them"
            ) from None


def _describe(device: NvmlDevice) -> CudaDevice:
    """Return what NVML reports of a device. Raise NvmlError if it does not know the name or the memory."""
    if device.is_partitioned():
        raise NvmlError("MIG partitions a device, of which CUDA uses one instance")
    name, memory = device.name(), device.memory_bytes()
    if name is None or memory is None:
        raise NvmlError(f"the {'name' if name is None else 'memory'} of a device is unknown")
    return CudaDevice(name, *memory, device.compute_capability())


def query_cuda() -> list[CudaDevice]:
    """Return the visible devices as CUDA describes them to a process that ends at once. Raise RuntimeError if it fails.

    The free memory is without that process's own context, half a gigabyte on each device.
    """
    command = [sys.executable, "-m", "harness.measure.cuda_query"]
    try:
        result = subprocess.run(
            command, env=os.environ | DEVICE_ORDER, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {QUERY_SECONDS:g} s") from None
    if result.returncode:
        raise RuntimeError(one_line((result.stderr.strip().splitlines() or ["no message"])[-1]))
    return [
        CudaDevice(name, free, total, None if capability is None else (capability[0], capability[1]))
        for name, free, total, capability in json.loads(result.stdout)
    ]


def wait_for_release(free_before: Sequence[int], free_now: Callable[[], Sequence[int]]) -> str | None:
    """Wait until the devices have as much free memory as before a run whose ranks were killed.

    Return None, or after RELEASE_SECONDS one line that says how much is missing, and which processes have memory there.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        missing = [before - now for before, now in zip(free_before, free_now(), strict=False)]
        if max(missing, default=0) <= SLACK_BYTES:
            return None
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    device = missing.index(max(missing))
    return (
        f"{RELEASE_SECONDS:g} s after the run device {device} has {format_bytes(missing[device])} less free memory than"
        f" before it{_holders(len(missing), device)}"
    )


def _holders(count: int, device: int) -> str:
    """Return the processes that have memory on a device, as the end of a sentence; '' where NVML does not tell."""
    try:
        processes = visible_devices(count)[device].process_bytes()
    except NvmlError:
        return ""
    texts = [
        f"process {pid}" + ("" if size is None else f" with {format_bytes(size)}")
        for pid, size in sorted((processes or {}).items())
    ]
    return f"; it is in use by {', '.join(texts)}" if texts else ""
