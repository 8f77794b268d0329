"""Where the time of a step goes: its phases, what of them is communication or waiting, and a pipeline's bubble."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.schema import RunConfig
from harness.cost_model import pipeline
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.probe import COMPUTE_PHASES
from harness.records.schema import OUTSIDE_PHASES, Rank, Row

# Which column a phase's computing counts to.
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

EXPOSED, IDLE = "exposed_communication_seconds", "idle_seconds"

PARTS = (*dict.fromkeys(PHASE_COLUMNS.values()), EXPOSED, IDLE)


def step_seconds(ranks: Sequence[Rank]) -> list[float]:
    """Of every timed step: as long as its slowest rank."""
    return [max(times) for times in zip(*(rank["step_seconds"] for rank in ranks), strict=True)]


def step_time_columns(layout: Layout, ranks: Sequence[Rank]) -> Row:
    """The median step, its spread, and its parts, which add up to it."""
    steps = step_seconds(ranks)
    ordered = sorted(steps)
    median = statistics.median(steps)
    middle = {steps.index(ordered[(len(steps) - 1) // 2]), steps.index(ordered[len(steps) // 2])}
    divided = [step_time_parts(layout, slowest_rank(ranks, step), step) for step in sorted(middle)]
    return {
        "step_seconds": median,
        "step_seconds_p95": quantile(ordered, 0.95),
        "step_seconds_spread": (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / median if len(steps) > 3 else None,
        **{name: statistics.mean(each[name] for each in divided) for name in PARTS},
        "overlapped_communication_seconds": overlapped_seconds(slowest_rank(ranks, min(middle)), median),
        **(dict.fromkeys((EXPOSED, IDLE)) if any(rank["traced"] is None for rank in ranks) else {}),
    }


def slowest_rank(ranks: Sequence[Rank], step: int) -> Rank:
    return max(ranks, key=lambda rank: rank["step_seconds"][step])


def step_time_parts(layout: Layout, rank: Rank, step: int) -> dict[str, float]:
    """One rank's timed step: its phases by the clock, each divided as the traced steps' was, undivided without.

    On a CPU a rank is idle where all is said and the others are waited for; on a GPU where it has nothing to do.
    """
    found = dict.fromkeys(PARTS, 0.0)
    timed = {name: seconds[step] for name, seconds in rank["phase_seconds"].items()}
    timed[OUTSIDE_PHASES] = rank["step_seconds"][step] - sum(timed.values())
    for name, seconds in timed.items():
        exposed, waiting = exposed_share((rank["traced"] or {"phases": {}})["phases"], name)
        if layout.pp > 1 and name in (OUTSIDE_PHASES, "norm"):  # all ranks meet in the norm: there the early ones wait
            exposed, waiting = 0.0, exposed + waiting
        elif name != OUTSIDE_PHASES and rank["device_name"] == "cpu":
            waiting = 0.0
        found[EXPOSED] += exposed * seconds
        found[IDLE] += waiting * seconds
        found[PHASE_COLUMNS[name]] += (1 - exposed - waiting) * seconds
    return found


def exposed_share(phases: Mapping[str, Mapping[str, float]], name: str) -> tuple[float, float]:
    """Of a phase, the share that communicated and the share that waited for messages, without computing."""
    traced = phases.get(name)
    if traced is None or not traced["seconds"]:
        return 0.0, 0.0
    return traced["exposed_seconds"] / traced["seconds"], traced["waiting_seconds"] / traced["seconds"]


def overlapped_seconds(rank: Rank, step: float) -> float | None:
    """Seconds of a step in which a collective was hidden behind computing."""
    traced = rank["traced"]
    return step * traced["overlapped_seconds"] / traced["seconds"] if traced and traced["seconds"] else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the values at that share of the way, linearly."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def bubble_columns(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> Row:
    """The pipeline's idle time in units of its working time, over all stages, beside the papers'."""
    stages = pipeline_entries(config, layout, ranks)
    if not stages:
        return {}
    idle, working = (sum(stage[key] for stage in stages) for key in ("idle_seconds", "working_seconds"))
    return {
        "bubble": idle / working,
        "bubble_formula": pipeline.bubble_ratio(layout, layout.grad_accumulation_steps(config.train)),
    }


def pipeline_entries(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """One entry a rank of a pipeline: its stages and layers, and how its time divides, medians over timed steps.

    Idle is what is left of a step beside data, forward, backward and optimizer: waiting for other stages and for the
    global norm, and sending.
    """
    return [stage_times(config, layout, rank) for rank in ranks] if layout.pp > 1 else []


def stage_times(config: RunConfig, layout: Layout, rank: Rank) -> dict[str, Any]:
    held = stages_of_rank(config.model, layout, rank["rank"])
    phases = rank["phase_seconds"]
    working = [sum(each) for each in zip(*(phases[name] for name in phases if name in COMPUTE_PHASES), strict=True)]
    each_step = zip(rank["step_seconds"], working, phases["optimizer"], phases["data"], strict=True)
    idle = [step - work - update - data for step, work, update, data in each_step]
    working_seconds, idle_seconds = statistics.median(working), statistics.median(idle)
    return {
        "rank": rank["rank"],
        "stages": [stage.index for stage in held],
        "layers": [stage.layers for stage in held],
        "working_seconds": working_seconds,
        "idle_seconds": idle_seconds,
        "idle_share": idle_seconds / (idle_seconds + working_seconds),
        "bubble": idle_seconds / working_seconds,
        "in_flight": rank["profiled"]["in_flight"],
        "activation_bytes": rank["profiled"]["activation_bytes"],
    }
