"""The Linux kernel's count of processes that it killed because memory ran out."""

from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def oom_kill_count(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how many processes of this control group, else of this machine, the kernel killed because memory ran out.

    It is 0 where the kernel does not report it (not Linux). If the count grew while a rank died of SIGKILL, the kernel
    killed that rank.
    """
    return next(_counts(proc, cgroups), 0)


def _counts(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the known counts, the most specific first: control groups version 2, version 1, the whole machine."""
    groups = dict(line.split(":", 2)[1:] for line in _lines(proc / "self" / "cgroup"))
    paths = []
    if "" in groups:
        paths.append(cgroups / groups[""].lstrip("/") / "memory.events")
    if "memory" in groups:
        paths.append(cgroups / "memory" / groups["memory"].lstrip("/") / "memory.oom_control")
    for path in (*paths, proc / "vmstat"):
        for line in _lines(path):
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                yield int(value)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
