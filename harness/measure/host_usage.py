"""Processor time, energy and memory that a rank's timed steps cost, and signs of other load on the machine."""

import functools
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.hardware import nvml
from harness.hardware.nvml import NvmlDevice
from harness.records.rank_report import HostUsage

_STATUS = Path("/proc/self/status")

SAMPLE_SECONDS = 0.2  # the time between two samples of clocks and processes

MIN_ENERGY_SECONDS = 2.0  # shorter steps have no energy: NVML's counter moves every few tens of milliseconds


Counters = dict[str, float | None]  # those that only grow, read at one moment, by the names of HostUsage


class HostUsageMeter:
    """A meter of the processor time, energy and memory that a rank uses between begin() and end().

    Call begin() after a barrier, and end() when the device has finished; neither call waits for a device. Processor
    times are read last at the beginning and first at the end, so that queries of devices are not counted.
    """

    def __init__(self, devices: Sequence[torch.device], helpers: Sequence[psutil.Process] | None = None) -> None:
        """Measure these devices. `helpers` defaults to the parent (a fork server) and its parent, the rank monitor."""
        self.helpers = psutil.Process().parents()[:2] if helpers is None else helpers
        self.nvml_devices = _nvml_devices(devices)
        self.throttle_reasons: set[str] | None = None
        self.device_pids: set[int] | None = None

    def begin(self) -> None:
        """Read the counters, and start to sample the devices in a thread."""
        self.stop_sampling = threading.Event()
        self.sampler = threading.Thread(target=self._sample_devices, daemon=True)
        if self.nvml_devices:
            self.sampler.start()
        self.energy_joules = _energy_joules(self.nvml_devices)
        self.first = _read_counters(self.helpers)

    def _sample_devices(self) -> None:
        """Sample while the steps run, as NVML reports clocks and processes only at one moment."""
        while not self.stop_sampling.is_set():
            reasons = [device.throttle_reasons() for device in self.nvml_devices]
            self.throttle_reasons = _union(self.throttle_reasons, reasons)
            self.device_pids = _union(self.device_pids, [device.process_ids() for device in self.nvml_devices])
            self.stop_sampling.wait(SAMPLE_SECONDS)

    def end(self) -> HostUsage:
        """Return what was used since begin()."""
        last = _read_counters(self.helpers)
        used: dict[str, Any] = {name: _difference(first, last[name]) for name, first in self.first.items()}
        energy_joules = _energy_joules(self.nvml_devices) if used["seconds"] >= MIN_ENERGY_SECONDS else None
        self.stop_sampling.set()
        if self.nvml_devices:
            self.sampler.join()
        # NVML may number processes as the host does and not as a container does. If this process is not among them, all
        # are unknown.
        pids = self.device_pids if self.device_pids is not None and os.getpid() in self.device_pids else None
        return HostUsage(
            pid=os.getpid(),
            host=socket.gethostname(),
            cores=len(_own_cores()),
            peak_rss_bytes=peak_rss_bytes(),
            energy_joules=_difference(self.energy_joules, energy_joules),
            clocks_lowered=None if self.throttle_reasons is None else sorted(self.throttle_reasons),
            device_pids=None if pids is None else sorted(pids),
            **used,
        )


def peak_rss_bytes() -> int | None:
    """Return the largest resident set size that this process ever had.

    Linux's ru_maxrss survives exec, so that a program would report the size of the process that started it. VmHWM is
    the program's own. After a fork without exec both begin with the shared pages.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"), None)


def _read_counters(helpers: Sequence[psutil.Process]) -> Counters:
    of_processes: Counters = {
        "seconds": time.perf_counter(),
        "cpu_seconds": time.process_time(),
        "helper_cpu_seconds": sum(map(_cpu_seconds, helpers)),
    }
    return of_processes | _core_seconds()


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended, or may not be read
        return 0.0
    return times.user + times.system


@functools.cache
def _own_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0) if sys.platform == "linux" else range(psutil.cpu_count() or 1)))


def _core_seconds() -> Counters:
    """Return all, busy and stolen seconds since boot of the cores that this process may use, by a single reading.

    Busy excludes interrupts, because part of the kernel's work for our own sockets is done there.
    """
    own = _own_cores()
    if len(own) == (psutil.cpu_count() or 1):
        times = [psutil.cpu_times()]
    else:
        by_core = psutil.cpu_times(percpu=True)
        times = [by_core[core] for core in own if core < len(by_core)]
    # The time of virtual machines that run here is already part of user time.
    return {
        "core_seconds": sum(
            sum(entry) - getattr(entry, "guest", 0.0) - getattr(entry, "guest_nice", 0.0) for entry in times
        ),
        "busy_seconds": sum(entry.user + entry.system + entry.nice for entry in times),
        "stolen_seconds": sum(entry.steal for entry in times) if hasattr(times[0], "steal") else None,
    }


def _nvml_devices(devices: Sequence[torch.device]) -> list[NvmlDevice]:
    """Return the CUDA devices as NVML knows them; none where MIG partitions one, as NVML reports only the whole."""
    # CUDA numbers the fastest device first and NVML sorts by position on the bus, so only the UUID is the same in both.
    uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices if device.type == "cuda"]
    nvml_devices = nvml.devices_by_uuid(uuids) if uuids else None
    if nvml_devices is None or any(device.is_partitioned() for device in nvml_devices):
        return []
    return nvml_devices


def _energy_joules(devices: Sequence[NvmlDevice]) -> float | None:
    """Return the energy that all devices consumed since the driver was loaded."""
    if not devices:
        return None
    energies = [device.energy_millijoules() for device in devices]
    known = [energy for energy in energies if energy is not None]
    return sum(known) / 1000 if len(known) == len(devices) else None


def _union(known: set[Any] | None, samples: Sequence[set[Any] | None]) -> set[Any] | None:
    """Return the union of the known sets, or None if none is known."""
    sets = [entry for entry in (known, *samples) if entry is not None]
    return set().union(*sets) if sets else None


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first
