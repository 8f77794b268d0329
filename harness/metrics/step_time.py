"""The time of a step: its phases, how much of them is communication or waiting, and a pipeline's bubble.

And the signs that something disturbed the timed steps, from their times and from the ranks' view of their machines.
"""

import statistics
from collections.abc import Iterator, Sequence

from harness.config.schema import TRACED_STEPS, RunConfig
from harness.cost_model import pipeline
from harness.cost_model.parts import STEP_PARTS
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.probe import COMPUTE_PHASES
from harness.records.rank_report import OUTSIDE_PHASES, HostUsage, PhaseShare, RankReport, TimeBreakdown
from harness.records.schema import Cells
from harness.util.files import JsonObject

# The column that the computing of each phase counts to.
PHASE_COLUMNS = {
    "data": "data_seconds",
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "backward_input": "backward_seconds",
    "backward_weight": "backward_seconds",
    "reduce": "backward_seconds",
    "norm": "optimizer_seconds",
    "optimizer": "optimizer_seconds",
    OUTSIDE_PHASES: "other_seconds",
}

EXPOSED, COPYING, IDLE = "exposed_communication_seconds", "exposed_copy_seconds", "idle_seconds"

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


def step_seconds(ranks: Sequence[RankReport]) -> list[float]:
    """Return the duration of every timed step, which is that of its slowest rank."""
    return [max(times) for times in zip(*(rank.step_seconds for rank in ranks), strict=True)]


def median_step_seconds(ranks: Sequence[RankReport]) -> float:
    """Return the median duration of the timed steps."""
    return statistics.median(step_seconds(ranks))


def step_time_columns(layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return the median step, its spread, and its parts, which add up to it.

    For an even number of steps the parts are the mean of those of the two steps in the middle.
    """
    steps = step_seconds(ranks)
    ordered = sorted(steps)
    median = median_step_seconds(ranks)
    middle = {steps.index(ordered[(len(steps) - 1) // 2]), steps.index(ordered[len(steps) // 2])}
    parts = [step_time_parts(layout, slowest_rank(ranks, step), step) for step in sorted(middle)]
    return {
        "step_seconds": median,
        "step_seconds_p95": quantile(ordered, 0.95),
        "step_seconds_iqr_ratio": (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / median
        if len(steps) > 3
        else None,
        **{name: statistics.mean(part[name] for part in parts) for name in STEP_PARTS},
        "overlapped_communication_seconds": overlapped_seconds(slowest_rank(ranks, min(middle)), median),
        **(dict.fromkeys((EXPOSED, COPYING, IDLE)) if any(breakdown_of(rank) is None for rank in ranks) else {}),
    }


def slowest_rank(ranks: Sequence[RankReport], step: int) -> RankReport:
    """Return the rank that took longest over a timed step."""
    return max(ranks, key=lambda rank: rank.step_seconds[step])


def step_time_parts(layout: Layout, rank: RankReport, step: int) -> dict[str, float]:
    """Return one rank's timed step by column, in seconds.

    The phases are timed by the clock, and divided as those of the traced steps; they stay undivided without a trace.
    On a CPU a rank is idle where it has sent everything and waits for others; on a GPU where it has nothing to do.
    """
    parts, on_gpu = dict.fromkeys(STEP_PARTS, 0.0), rank.device_name != "cpu"
    timed = {name: seconds[step] for name, seconds in rank.phase_seconds.items()}
    timed[OUTSIDE_PHASES] = rank.step_seconds[step] - sum(timed.values())
    breakdown = breakdown_of(rank)
    for name, seconds in timed.items():
        traced = breakdown.phases.get(name) if breakdown else None
        exposed, waiting, copying = exposed_shares(traced, seconds, on_gpu)
        if layout.pp_enabled and name in (OUTSIDE_PHASES, "norm"):  # all ranks meet in the norm, and early ones wait
            sending, idle = 0.0, exposed + waiting
        elif on_gpu or name == OUTSIDE_PHASES:
            sending, idle = exposed, waiting
        else:  # on a CPU a phase that waits computes meanwhile
            sending, idle = exposed, 0.0
        parts[EXPOSED] += sending * seconds
        parts[IDLE] += idle * seconds
        parts[COPYING] += copying * seconds
        parts[PHASE_COLUMNS[name]] += (1 - sending - idle - copying) * seconds
    return parts


def breakdown_of(rank: RankReport) -> TimeBreakdown | None:
    """Return how a rank's traced steps divide; None without a trace, or where it has the kernels of several devices."""
    return rank.time_breakdown if rank.devices == 1 else None


def exposed_shares(traced: PhaseShare | None, seconds: float, on_gpu: bool) -> tuple[float, float, float]:
    """Return the shares of a timed phase spent on communication, on waiting and on copies, all without computing.

    `seconds` is the phase's time in a timed step. On a GPU the profiler delays the host, so that the device waits
    longer in traced steps, but its kernels and copies take their time: the rest of the timed phase is waiting.
    """
    if traced is None:
        return 0.0, 0.0, 0.0
    whole, waiting = traced.seconds, traced.waiting_seconds
    if on_gpu:
        busy = traced.seconds - traced.waiting_seconds
        whole = max(busy, TRACED_STEPS * seconds)
        waiting = whole - busy
    if not whole:
        return 0.0, 0.0, 0.0
    return traced.exposed_seconds / whole, waiting / whole, traced.copy_seconds / whole


def overlapped_seconds(rank: RankReport, step: float) -> float | None:
    """Return the seconds of a step in which a collective was hidden behind computing; None without a trace."""
    breakdown = breakdown_of(rank)
    if breakdown is None or not breakdown.seconds:
        return None
    whole = breakdown.seconds if rank.device_name == "cpu" else TRACED_STEPS * step
    return step * min(1.0, breakdown.overlapped_seconds / whole)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, with linear interpolation between the two nearest."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def bubble_columns(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return the pipeline's idle time over its working time, of all stages together, and the papers' formula for it."""
    stages = pipeline_entries(config, layout, ranks)
    if not stages:
        return {}
    idle, working = sum(s["idle_seconds"] for s in stages), sum(s["working_seconds"] for s in stages)
    return {
        "pipeline_bubble": idle / working,
        "pipeline_bubble_theory": pipeline.bubble_ratio(layout, layout.grad_accumulation_steps(config.train)),
    }


def pipeline_entries(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> list[JsonObject]:
    """Return one entry per rank of a pipeline: its stages and layers, and the medians of its times over timed steps.

    The idle time is what a step takes beside data, forward, backward and optimizer: sending, and waiting for other
    stages and for the global norm.
    """
    return [stage_times(config, layout, rank) for rank in ranks] if layout.pp_enabled else []


def stage_times(config: RunConfig, layout: Layout, rank: RankReport) -> JsonObject:
    """Return the entry of one rank of a pipeline."""
    stages = stages_of_rank(config.model, layout, rank.rank)
    phases = rank.phase_seconds
    working = [
        sum(seconds) for seconds in zip(*(phases[name] for name in phases if name in COMPUTE_PHASES), strict=True)
    ]
    steps = zip(rank.step_seconds, working, phases["optimizer"], phases["data"], strict=True)
    idle = [step - work - update - data for step, work, update, data in steps]
    working_seconds, idle_seconds = statistics.median(working), statistics.median(idle)
    return {
        "rank": rank.rank,
        "stages": [stage.index for stage in stages],
        "layers": [stage.layers for stage in stages],  # of each
        "working_seconds": working_seconds,
        "idle_seconds": idle_seconds,
        "idle_share": idle_seconds / (idle_seconds + working_seconds),
        "bubble": idle_seconds / working_seconds,
        "in_flight": rank.profiled.max_in_flight_micro_batches,
        "activation_bytes": rank.profiled.activation_bytes,
    }


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
