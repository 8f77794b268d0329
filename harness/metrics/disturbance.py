"""Whether anything disturbed the timed steps, told from them and from what every rank saw around them."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Below, processor times say too little: the kernel counts a core's in ticks of 10 ms (man 5 proc, /proc/stat).
SHORTEST_SECONDS = 0.3

TICK_SECONDS = 0.01

OTHERS_SHARE = 0.1  # of the cores' time, taken by other processes

CROWDED_SHARE = 0.5  # of the cores' time, by anyone: below, not even two logical cores on one leave a process waiting

STOLEN_SHARE = 0.05  # of the cores' time, given to other virtual machines

# Of a trend. Simulated without one (normal, heavy-tailed, two-valued noise), 9 steps are called a trend in up to 3 % of
# runs and 50 in under 0.5 %; a shift by 0.3 of the step at 4 % noise is found in 98 %. Noise that wanders from step to
# step (autoregressive, 0.7) is called one in 13 % and under 0.5 %: in few steps it is none other.
TREND_STEPS = 9

TREND_SHARE = 0.1

TREND_SCATTERS = 3


def disturbance_text(steps: Sequence[float], usages: Sequence[Mapping[str, Any]]) -> str:
    """Why the timed steps may not be what they would be on a quiet machine, in words; empty if nothing says so.

    steps: seconds of each, in order. usages: of every rank, the fields of Used. Silence is no proof.
    """
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for usage in usages:
        hosts.setdefault(usage["host"], []).append(usage)
    found = [trend_text(steps)]
    for host, ranks in hosts.items():
        where = f" on {host}" if len(hosts) > 1 else ""
        found += [what and what + where for what in (*_cores_taken(ranks), _clocks(ranks), _strangers(ranks))]
    return "; ".join(what for what in found if what)


def trend_text(steps: Sequence[float]) -> str:
    """Whether steps became slower or faster: medians of the first and the last third, against bound and own scatter."""
    if len(steps) < TREND_STEPS:
        return ""
    third = len(steps) // 3
    first, last = steps[:third], steps[-third:]
    start, end = statistics.median(first), statistics.median(last)
    change = end - start
    if abs(change) <= max(TREND_SHARE * start, TREND_SCATTERS * max(_scatter(first), _scatter(last))):
        return ""
    became = "slower" if change > 0 else "faster"
    return f"steps became {abs(change) / start:.0%} {became} from the first third to the last"


def _scatter(steps: Sequence[float]) -> float:
    """The interquartile range."""
    lower, _, upper = statistics.quantiles(steps, n=4, method="inclusive")
    return upper - lower


def _cores_taken(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Whether others used the cores of a host: beside its ranks and those that watch them, or beside the machine."""
    if max(rank["seconds"] for rank in ranks) < SHORTEST_SECONDS:
        return
    # Ranks begin and end at not quite the same moment; what the one saw that saw least is on the safe side.
    seen = min(ranks, key=lambda rank: rank["busy_seconds"])
    cores, all_cores = seen["cores"], seen["core_seconds"]
    busy, stolen = seen["busy_seconds"], seen["stolen_seconds"] or 0.0
    ours = sum(rank["cpu_seconds"] for rank in ranks) + max(rank["helper_cpu_seconds"] for rank in ranks)
    others, doubt = busy - ours, 2 * TICK_SECONDS * cores  # a tick a core at either end
    if others > OTHERS_SHARE * all_cores + doubt and busy + stolen > CROWDED_SHARE * all_cores:
        yield f"other processes took {others / all_cores * cores:.1f} of {cores} cores"
    if stolen > STOLEN_SHARE * all_cores + doubt:
        yield f"other virtual machines took {stolen / all_cores * cores:.1f} of {cores} cores"


def _clocks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The power limit is recorded and no disturbance: it is the device's own, and heavy work is to reach it."""
    reasons = {reason for rank in ranks for reason in rank["clocks_lowered"] or ()} - {"power limit"}
    return f"a device's clocks were lowered ({', '.join(sorted(reasons))})" if reasons else ""


def _strangers(ranks: Sequence[Mapping[str, Any]]) -> str:
    seen = {pid for rank in ranks for pid in rank["device_pids"] or ()} - {rank["pid"] for rank in ranks}
    return f"other processes on a device ({', '.join(map(str, sorted(seen)))})" if seen else ""
