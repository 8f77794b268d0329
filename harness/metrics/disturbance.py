"""Signs that something disturbed the timed steps, from their times and from the ranks' view of their machines."""

import statistics
from collections.abc import Iterator, Sequence

from harness.records.rank_report import HostUsage

# Processor times of shorter runs are too coarse: the kernel counts in ticks of 10 ms (man 5 proc, /proc/stat).
SHORTEST_SECONDS = 0.3

TICK_SECONDS = 0.01

OTHERS_SHARE = 0.1  # of the cores' time, used by other processes

# The share of the cores' time that all processes use together. Below it no process waits for a core, even if two
# logical cores share a physical one.
CROWDED_SHARE = 0.5

STOLEN_SHARE = 0.05  # of the cores' time, given to other virtual machines

# The bounds of a trend. In simulations without a trend (normal, heavy-tailed and two-valued noise), up to 3 % of runs
# of 9 steps are reported as one and under 0.5 % of runs of 50 steps; a shift by 0.3 of a step at 4 % noise is found in
# 98 %. Autoregressive noise (0.7) is reported as a trend in 13 % and under 0.5 %: over few steps they look the same.
TREND_STEPS = 9

TREND_SHARE = 0.1

TREND_SCATTERS = 3


def disturbance_text(steps: Sequence[float], usages: Sequence[HostUsage]) -> str:
    """Return why the timed steps may differ from those on a quiet machine; empty if there is no sign of it.

    `steps` are the seconds of each step in order, `usages` those of every rank. An empty text is no proof of quiet.
    """
    hosts: dict[str, list[HostUsage]] = {}
    for usage in usages:
        hosts.setdefault(usage.host, []).append(usage)
    signs = [trend_text(steps)]
    for host, ranks in hosts.items():
        suffix = f" on {host}" if len(hosts) > 1 else ""
        signs += [sign and sign + suffix for sign in (*_used_cores(ranks), _clocks(ranks), _foreign_processes(ranks))]
    return "; ".join(sign for sign in signs if sign)


def trend_text(steps: Sequence[float]) -> str:
    """Return a phrase if steps became slower or faster, by the medians of their first and last third, else ''.

    A difference counts if it exceeds a share of the step and several times the scatter within the thirds.
    """
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
    """Return the interquartile range."""
    lower, _, upper = statistics.quantiles(steps, n=4, method="inclusive")
    return upper - lower


def _used_cores(ranks: Sequence[HostUsage]) -> Iterator[str]:
    """Yield a phrase if other processes used the cores of a host, and one if other virtual machines did."""
    if max(rank.seconds for rank in ranks) < SHORTEST_SECONDS:
        return
    # Ranks do not start and end at exactly the same moment, so that the least use that any observed is safe.
    host = min(ranks, key=lambda rank: rank.busy_seconds)
    cores, all_cores = host.cores, host.core_seconds
    busy, stolen = host.busy_seconds, host.stolen_seconds or 0.0
    ours = sum(rank.cpu_seconds for rank in ranks) + max(rank.helper_cpu_seconds for rank in ranks)
    others, error = busy - ours, 2 * TICK_SECONDS * cores  # one tick per core at each end
    if others > OTHERS_SHARE * all_cores + error and busy + stolen > CROWDED_SHARE * all_cores:
        yield f"other processes took {others / all_cores * cores:.1f} of {cores} cores"
    if stolen > STOLEN_SHARE * all_cores + error:
        yield f"other virtual machines took {stolen / all_cores * cores:.1f} of {cores} cores"


def _clocks(ranks: Sequence[HostUsage]) -> str:
    """Return why clocks were lowered; the power limit is no disturbance, since heavy work is meant to reach it."""
    reasons = {reason for rank in ranks for reason in rank.clocks_lowered or ()} - {"power limit"}
    return f"a device's clocks were lowered ({', '.join(sorted(reasons))})" if reasons else ""


def _foreign_processes(ranks: Sequence[HostUsage]) -> str:
    pids = {pid for rank in ranks for pid in rank.device_pids or ()} - {rank.pid for rank in ranks}
    return f"other processes on a device ({', '.join(map(str, sorted(pids)))})" if pids else ""
