"""The placement of runs side by side on one machine's CUDA devices: which devices go together, and whose cores."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.hardware.nvml import CONNECTIONS, NvmlError, visible_device_ids, visible_devices

CPUS = Path("/sys/devices/system/cpu")

SPEED_ORDER = ("-", "NVLink", *CONNECTIONS.values())  # what connects two devices, fastest first


@dataclass(frozen=True)
class DevicePlacement:
    """The visible devices by the names that CUDA_VISIBLE_DEVICES takes, each with cores of its own and its links."""

    device_ids: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()  # of each device
    connections: tuple[tuple[str | None, ...], ...] = ()  # from each device to each other; empty if unknown


def place_devices(count: int, cores: Sequence[int]) -> DevicePlacement:
    """Return the placement on `count` visible devices and these cores; without NVML all devices count as alike."""
    device_ids = tuple(visible_device_ids(count))
    try:
        devices = visible_devices(count)
    except NvmlError:
        return DevicePlacement(device_ids, divide_cores([None] * count, cores, physical_core))
    near = [device.near_cores(max(cores)) for device in devices]
    connections = tuple(tuple(device.connection_to(other) for other in devices) for device in devices)
    return DevicePlacement(device_ids, divide_cores(near, cores, physical_core), connections)


def physical_core(core: int) -> int:
    """Return the smallest number among the hyper-threads of a core's physical core; the core itself if unknown."""
    try:
        siblings = (CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        return int(siblings.strip().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


def divide_cores(
    near: Sequence[set[int] | None], cores: Sequence[int], physical: Callable[[int], int]
) -> tuple[tuple[int, ...], ...]:
    """Return cores for each device: its share of those near it, or of all if it is near none of them.

    Devices near the same cores have equal shares of whole physical cores, whose number `physical` returns for a core;
    where there are fewer than devices, they share all of them.
    """
    pools = [tuple(core for core in cores if own is not None and core in own) or tuple(cores) for own in near]
    shares = []
    for index, pool in enumerate(pools):
        threads: dict[int, list[int]] = {}
        for core in pool:
            threads.setdefault(physical(core), []).append(core)
        size, position = len(threads) // pools.count(pool), pools[:index].count(pool)
        chosen = sorted(threads)[position * size : (position + 1) * size] if size else sorted(threads)
        shares.append(tuple(sorted(core for number in chosen for core in threads[number])))
    return tuple(shares)


@functools.cache
def closest_devices(
    connections: tuple[tuple[str | None, ...], ...], free: tuple[int, ...], count: int
) -> tuple[int, ...]:
    """Return `count` of the devices with the free indices: those whose slowest connection is fastest.

    A sweep calls this over and over.
    """

    def slowness(devices: tuple[int, ...]) -> tuple[int, int]:
        """Return the rank of the slowest connection between devices, and the sum of all; an unknown one is last."""
        pairs = [connections[first][second] for first, second in itertools.combinations(devices, 2)]
        ranks = [SPEED_ORDER.index(pair) if pair in SPEED_ORDER else len(SPEED_ORDER) for pair in pairs]
        return max(ranks, default=0), sum(ranks)

    if not connections or count == len(free):
        return free[:count]
    return min(itertools.combinations(free, count), key=slowness)
