"""The limits of a machine on files, processes, shared memory and cores, and whether ranks run well within them."""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.config.schema import Device
from harness.hardware.machine import CORES_PER_GPU_RANK
from harness.util.text import count_text, format_bytes

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

COMMAND_FILES, RANK_FILES = 32, 8  # that the command opens for any run, and for every rank of it; a rank opens as many

SHARED_MEMORY_BYTES = 2**30  # what NCCL's guide gives a container

COMMAND_THREADS, RANK_THREADS = 8, 12  # of the command and its forkserver, and of a rank without its math library's


def limit_problem(ranks: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> str | None:
    """Return which limit is too low for so many ranks on this machine, with the remedy, in one line; None if none."""
    files = COMMAND_FILES + RANK_FILES * ranks
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < files:
        return f"{_needs(ranks, files, 'open files')} and `ulimit -n` is {most}: raise it, with ulimit -n {files}"
    threads = COMMAND_THREADS + RANK_THREADS * ranks
    for most, running, remedy in _process_limits(proc, cgroups):
        if most - running < threads:
            limited = f"{most} are allowed, of which {running} exist"
            return f"{_needs(ranks, threads, 'processes and threads')} and {limited}: {remedy}"
    return None


def _needs(ranks: int, number: int, things: str) -> str:
    return f"world_size: {ranks} {'rank' if ranks == 1 else 'ranks'} on this machine need {number} {things},"


def _process_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int, str]]:
    """Yield limits on processes and threads: the most, those that exist, and how the limit is raised."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() and most != resource.RLIM_INFINITY:  # root has no limit
        yield most, _user_threads(proc), "raise the limit, with ulimit -u"
    for group in control_groups("pids", proc, cgroups):
        limit, running = (lines_of(group / name) for name in ("pids.max", "pids.current"))
        if limit and limit[0].isdigit():  # and not max
            yield int(limit[0]), int(running[0]), "raise pids.max of its control group, a container's with --pids-limit"


def control_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the folders of this process's control groups: that of version 2, and of a controller of version 1."""
    groups = dict(line.split(":", 2)[1:] for line in lines_of(proc / "self" / "cgroup"))
    folders = {"": cgroups, controller: cgroups / controller}
    return [folder / groups[name].lstrip("/") for name, folder in folders.items() if name in groups]


def lines_of(path: Path) -> list[str]:
    """Return a file's lines, none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _user_threads(proc: Path) -> int:
    """Return how many threads the processes of this user have."""
    threads = 0
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                threads += len([*(process / "task").iterdir()])
    return threads


def shared_memory_note(device: Device, ranks: int, folder: Path = Path("/dev/shm")) -> str | None:
    """Return a warning if the folder through which NCCL connects GPUs without NVLink has little space, else None."""
    if device != "cuda" or ranks < 2 or not folder.is_dir():
        return None
    free = shutil.disk_usage(folder).free
    if free >= SHARED_MEMORY_BYTES:
        return None
    return (
        f"{folder} has {format_bytes(free)} free, and NCCL may need up to {format_bytes(SHARED_MEMORY_BYTES)} between"
        " GPUs without NVLink: a container gets it with --shm-size=1g"
    )


def core_note(device: Device, ranks: int, cores: int) -> str | None:
    """Return a warning if the ranks on GPUs have too few cores to launch kernels in time, else None."""
    if device != "cuda" or cores >= CORES_PER_GPU_RANK * ranks:
        return None
    return (
        f"{count_text(ranks, 'rank')} on GPUs and {count_text(cores, 'core')}, fewer than {CORES_PER_GPU_RANK} for a"
        " rank: steps may wait for the processor. Slurm gives more with --cpus-per-task"
    )
