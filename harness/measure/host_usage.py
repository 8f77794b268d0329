"""What a rank's timed steps cost its host and device, and what else it saw there."""

import functools
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from harness.hardware.nvml import nvml_or_none

_STATUS = Path("/proc/self/status")

SAMPLE_SECONDS = 0.2

ENERGY_SECONDS = 2.0  # of the steps at least: NVML's counter moves every few tens of milliseconds


@dataclass(frozen=True)
class HostUsage:
    """From begin() to end(), as one rank saw it. None is unknown."""

    pid: int
    host: str
    seconds: float
    cpu_seconds: float  # of this process: all threads, in user and system mode
    helper_cpu_seconds: float  # of the processes that started it and watch it
    cores: int  # that it may use
    core_seconds: float  # of these cores, busy, idle or stolen; by the same clock as the next two
    busy_seconds: float  # of these cores in user and system mode, for any process of this machine
    stolen_seconds: float | None  # of these cores, given to other virtual machines; Linux alone knows
    peak_host_bytes: int | None  # the most of this process that was ever resident, shared pages included
    energy_joules: float | None  # of its devices; unknown for steps too short to tell
    clocks_lowered: list[str] | None  # why, where they were: "power limit", "heat", "power brake", "hardware"
    device_pids: list[int] | None  # processes seen on its devices, itself among them


class _Moment(NamedTuple):
    seconds: float
    cpu_seconds: float
    helper_cpu_seconds: float
    core_seconds: float
    busy_seconds: float
    stolen_seconds: float | None


class HostUsageMeter:
    """begin() after a barrier, end() when the device has done its work: neither waits for a device.

    Processor times begin last and end first, so that asking the devices is not part of them.
    """

    def __init__(self, devices: Sequence[torch.device], helpers: Sequence[psutil.Process] | None = None) -> None:
        """helpers: by default the parent, a fork server, and its parent, that watches."""
        self.helpers = psutil.Process().parents()[:2] if helpers is None else helpers
        self.handles = _handles(devices)
        self.lowered: set[str] | None = None
        self.pids: set[int] | None = None

    def begin(self) -> None:
        self.over = threading.Event()
        self.watching = threading.Thread(target=self._watch, daemon=True)
        if self.handles:
            self.watching.start()
        self.energy_joules = _energy_joules(self.handles)
        self.first = _now(self.helpers)

    def _watch(self) -> None:
        """Looks again and again, beside the steps: NVML knows of clocks and processes the moment alone."""
        while not self.over.is_set():
            self.lowered = _union(self.lowered, [_lowered(handle) for handle in self.handles])
            self.pids = _union(self.pids, [_pids(handle) for handle in self.handles])
            self.over.wait(SAMPLE_SECONDS)

    def end(self) -> HostUsage:
        last, first = _now(self.helpers), self.first
        energy_joules = _energy_joules(self.handles) if last.seconds - first.seconds >= ENERGY_SECONDS else None
        self.over.set()
        if self.handles:
            self.watching.join()
        # In a container NVML may number processes as the host does: then ours is not among them, and nothing is known.
        pids = self.pids if self.pids is not None and os.getpid() in self.pids else None
        return HostUsage(
            pid=os.getpid(),
            host=socket.gethostname(),
            seconds=last.seconds - first.seconds,
            cpu_seconds=last.cpu_seconds - first.cpu_seconds,
            helper_cpu_seconds=last.helper_cpu_seconds - first.helper_cpu_seconds,
            cores=len(_own_cores()),
            core_seconds=last.core_seconds - first.core_seconds,
            busy_seconds=last.busy_seconds - first.busy_seconds,
            stolen_seconds=_difference(first.stolen_seconds, last.stolen_seconds),
            peak_host_bytes=peak_rss_bytes(),
            energy_joules=_difference(self.energy_joules, energy_joules),
            clocks_lowered=None if self.lowered is None else sorted(self.lowered),
            device_pids=None if pids is None else sorted(pids),
        )


def peak_rss_bytes() -> int | None:
    """The most of this process that was ever resident.

    ru_maxrss of Linux survives exec: a program would report what its starter held. VmHWM is the program's own; after a
    mere fork both begin with what is shared.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"), None)


def _now(helpers: Sequence[psutil.Process]) -> _Moment:
    return _Moment(time.perf_counter(), time.process_time(), sum(map(_cpu_seconds, helpers)), *_cores())


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it ended, or hides
        return 0.0
    return times.user + times.system


@functools.cache
def _own_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0) if sys.platform == "linux" else range(psutil.cpu_count() or 1)))


def _cores() -> tuple[float, float, float | None]:
    """All, busy and stolen seconds of the cores this process may use, since the machine started, by one look.

    Busy is without interrupts: the kernel's work for our own sockets is partly done there.
    """
    own, every = _own_cores(), psutil.cpu_count() or 1
    if len(own) == every:
        times = [psutil.cpu_times()]
    else:
        each = psutil.cpu_times(percpu=True)
        times = [each[core] for core in own if core < len(each)]
    # A guest's time is in its host's user time already.
    total = sum(sum(entry) - getattr(entry, "guest", 0.0) - getattr(entry, "guest_nice", 0.0) for entry in times)
    busy = sum(entry.user + entry.system + entry.nice for entry in times)
    return total, busy, sum(entry.steal for entry in times) if hasattr(times[0], "steal") else None


def _handles(devices: Sequence[torch.device]) -> list[Any]:
    """NVML's handles of CUDA devices; none where it cannot tell a device from others, as of one cut up by MIG."""
    devices = [device for device in devices if device.type == "cuda"]
    if not devices:
        return []
    import pynvml

    nvml_or_none(pynvml.nvmlInit)
    # By number they could be others: CUDA numbers the fastest first, NVML by place on the bus.
    names = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
    handles = [nvml_or_none(pynvml.nvmlDeviceGetHandleByUUID, name) for name in names]
    if None in handles or any((nvml_or_none(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0] for handle in handles):
        return []
    return handles


def _energy_joules(handles: Sequence[Any]) -> float | None:
    """Of all devices since the driver was loaded."""
    if not handles:
        return None
    import pynvml

    millijoules = [nvml_or_none(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]
    return None if None in millijoules else sum(millijoules) / 1000


def _lowered(handle: Any) -> set[str] | None:
    """Why the clocks are below what they could be, idleness and the user's own settings aside."""
    import pynvml

    reasons = nvml_or_none(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # drivers before 535 have the older name alone
        reasons = nvml_or_none(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if reasons is None:
        return None
    words = {
        pynvml.nvmlClocksThrottleReasonSwPowerCap: "power limit",
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware",
    }
    return {word for bit, word in words.items() if reasons & bit}


def _pids(handle: Any) -> set[int] | None:
    import pynvml

    processes = nvml_or_none(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return None if processes is None else {process.pid for process in processes}


def _union(known: set[Any] | None, found: Sequence[set[Any] | None]) -> set[Any] | None:
    """With what was found where anything was; None while nothing ever was."""
    sets = [entry for entry in (known, *found) if entry is not None]
    return set().union(*sets) if sets else None


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first
