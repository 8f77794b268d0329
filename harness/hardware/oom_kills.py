"""The host as the kernel tells of it."""

from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def oom_kill_count(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """How many processes the kernel killed for want of memory: of this process's control group, else of the machine.

    0 where it does not tell (not Linux). A count that grew while a rank died of SIGKILL says what killed it.
    """
    return next(_counts(proc, cgroups), 0)


def _counts(proc: Path, cgroups: Path) -> Iterator[int]:
    """In the order of trust: version 2, version 1, all of the machine."""
    groups = dict(line.split(":", 2)[1:] for line in _lines(proc / "self" / "cgroup"))
    places = []
    if "" in groups:
        places.append(cgroups / groups[""].lstrip("/") / "memory.events")
    if "memory" in groups:
        places.append(cgroups / "memory" / groups["memory"].lstrip("/") / "memory.oom_control")
    for path in (*places, proc / "vmstat"):
        for line in _lines(path):
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                yield int(value)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
