"""The time of a step: its phases, how much of them is communication or waiting, and a pipeline's bubble."""

import statistics
from collections.abc import Sequence

from harness.config.schema import TRACED_STEPS, RunConfig
from harness.cost_model import pipeline
from harness.cost_model.parts import STEP_PARTS
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.probe import COMPUTE_PHASES
from harness.records.rank_report import OUTSIDE_PHASES, PhaseShare, RankReport, TimeBreakdown
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
