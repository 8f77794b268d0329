"""From what the ranks wrote down to one row: maxima over ranks, the whole world's speed, the whole step's time."""

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import job, records
from harness.config import RunConfig
from harness.layout import Layout
from harness.machine import Machine
from harness.measure.communication import axis_of
from harness.measure.environment import environment
from harness.measure.probe import WORKING
from harness.placement import stages, stages_of_rank
from harness.plan import pipeline as plan
from harness.proof import Rank
from harness.records import Record
from harness.sizes import parameter_count

Row = dict[str, Any]

AT_PEAK = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


# What stays in the rank files alone: long lists that only the proof reads.
_LONG = (
    *("parameters", "optimizer", "first_gradients", "first_moments", "last_gradients"),
    *("last_parameters", "last_masters", "phase_seconds", "traceback"),
)


def record(
    config: RunConfig,
    machine: Machine,
    layout: Layout | None,
    run_id: str,
    ending: Row,
    ranks: Sequence[Rank] = (),
    extra: dict[str, Any] | None = None,
) -> Record:
    """Everything known of one run; `ending` holds its status, reason and figures. layout is None if there is none."""
    whole = configured(config, layout) | {
        "run_id": run_id,
        "measured_on": machine.device_name,
        "started_at": datetime.now(UTC).isoformat(),
    }
    return {
        "row": whole | ending,
        "config": config.to_dict(),
        "layout": layout.to_dict() if layout else None,
        "ranks": [{key: value for key, value in rank.items() if key not in _LONG} for rank in ranks],
        "environment": environment(machine),
        "versions": records.versions(),
        "commit": records.git_commit(),
        **(extra or {}),
    }


def configured(config: RunConfig, layout: Layout | None) -> Row:
    """The columns known before anything runs; degrees are empty where the layout could not be resolved."""
    row: Row = {
        "name": config.name,
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "strategy": config.strategy.name,
        "engine": config.strategy.engine,
        "checkpointing": config.checkpointing.name,
        "precision": config.precision.name,
        "zero_stage": config.strategy.zero_stage,
        "micro_batch": config.train.micro_batch,
        "global_batch": config.train.global_batch,
        "seq_len": config.train.seq_len,
        "repeat": config.repeat,
        "launch": "processes",
    }
    if layout is not None:
        degrees = ("world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp")
        row |= {degree: getattr(layout, degree) for degree in degrees}
        row["grad_accumulation"] = layout.accumulation(config.train)
        if layout.pp > 1:
            split = [str(stage.layers) for stage in stages(config.model, layout)]
            row |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
            row["layers_per_stage"] = "-".join(split)
        if layout.tp > 1:
            row["sequence_parallel"] = layout.sequence_parallel
    return row


def read_ranks(run_dir: Path, world_size: int) -> list[Rank]:
    """The rank files there are, whole or not written at all."""
    paths = [job.rank_file(run_dir, rank) for rank in range(world_size)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def measured(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> Row:
    """The columns of a finished run. Memory is the maximum over ranks; a step is as long as its slowest rank."""
    steps = [max(times) for times in zip(*(rank["step_seconds"] for rank in ranks), strict=True)]
    step_seconds = statistics.median(steps)
    tokens_per_second = config.train.global_batch * config.train.seq_len / step_seconds
    losses = mean_losses(ranks)
    fullest = max(ranks, key=lambda rank: rank["peak_allocated_bytes"] or 0)
    # A process that drives several devices does so in threads and copies that these meters do not see.
    seen_whole = all(rank["devices"] == 1 for rank in ranks)
    return {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second / sum(rank["devices"] for rank in ranks),
        "step_seconds": step_seconds,
        "peak_allocated_bytes": fullest["peak_allocated_bytes"],
        "peak_reserved_bytes": _most(rank["peak_reserved_bytes"] for rank in ranks),
        "peak_rank": None if fullest["peak_allocated_bytes"] is None else fullest["rank"],
        "parameter_bytes": _most(rank["parameter_bytes"] for rank in ranks),
        "gradient_bytes": _most(rank["profiled"]["gradient_bytes"] for rank in ranks),
        "optimizer_bytes": _most(rank["optimizer_bytes"] for rank in ranks),
        "activation_bytes": _most(rank["profiled"]["activation_bytes"] for rank in ranks) if seen_whole else None,
        "communication_bytes": round(max(map(sent_bytes, ranks))) if seen_whole else None,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "in_flight": _most(rank["profiled"]["in_flight"] for rank in ranks),
        "measured_on": fullest["device_name"],
        **at_peak(fullest),
        **bubble(config, layout, ranks),
    }


def bubble(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> Row:
    """The pipeline's idle time in units of its working time, over all stages, beside the papers'."""
    stages = pipeline(config, layout, ranks)
    if not stages:
        return {}
    idle, working = (sum(stage[key] for stage in stages) for key in ("idle_seconds", "working_seconds"))
    return {"bubble": idle / working, "bubble_formula": plan.bubble(layout, layout.accumulation(config.train))}


def pipeline(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """One entry a rank of a pipeline: its stages and layers, and how its time divides, medians over timed steps.

    Idle is what is left of a step beside forward, backward and optimizer: waiting for other stages and for the global
    norm, sending, and making the batch.
    """
    return [stage_times(config, layout, rank) for rank in ranks] if layout.pp > 1 else []


def stage_times(config: RunConfig, layout: Layout, rank: Rank) -> dict[str, Any]:
    held = stages_of_rank(config.model, layout, rank["rank"])
    phases = {name: seconds for name, seconds in rank["phase_seconds"].items() if name in WORKING}
    working = [sum(parts) for parts in zip(*phases.values(), strict=True)]
    optimizer = rank["phase_seconds"]["optimizer"]
    parts = zip(rank["step_seconds"], working, optimizer, strict=True)
    idle = [step - work - update for step, work, update in parts]
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


def at_peak(rank: Rank) -> Row:
    """What filled the peak; the parts and `other` (gathered copies, buffers, temporaries) add up to it."""
    parts = rank["profiled"]["at_peak"]
    if parts is None:
        return {}
    named = {f"at_peak_{key}": parts[key] for key in AT_PEAK}
    other = rank["peak_allocated_bytes"] - sum(named.values())
    if other < 0:  # the profiled step was not like the timed ones: better no parts than wrong ones
        return {}
    return named | {"at_peak_other_bytes": other, "peak_phase": parts["phase"]}


def communication(layout: Layout, rank: Rank) -> list[dict[str, Any]]:
    """What one rank sends in a step, by operation, mesh axis and width."""
    return [
        {
            "operation": entry["operation"],
            "axis": axis_of(entry["group_ranks"], layout),
            "dtype": entry["dtype"],
            "bytes": entry["bytes_sent"],
            "count": entry["count"],
        }
        for entry in rank["profiled"]["communication"]
    ]


def sent_bytes(rank: Rank) -> float:
    total: float = sum(entry["bytes_sent"] for entry in rank["profiled"]["communication"])
    return total


def steps(config: RunConfig, ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """One entry a step for steps.jsonl: the world's mean loss, the global gradient norm, the slowest rank's time."""
    losses, norms = mean_losses(ranks), ranks[0]["grad_norms"]
    warm_up, timed = config.train.warmup_steps, config.train.steps
    seconds = [max(times) for times in zip(*(rank["step_seconds"] for rank in ranks), strict=True)]
    phases = ["warm-up"] * warm_up + ["timed"] * timed + ["profiled"]
    times = [None] * warm_up + seconds + [None]
    return [
        {"step": step, "phase": phase, "loss": loss, "grad_norm": norm, "seconds": time}
        for step, (phase, loss, norm, time) in enumerate(zip(phases, losses, norms, times, strict=True))
    ]


def mean_losses(ranks: Sequence[Rank]) -> list[float | None]:
    """Of every step over the ranks; None where one is not finite."""
    by_step = zip(*(rank["losses"] for rank in ranks), strict=True)
    return [None if None in losses else sum(losses) / len(losses) for losses in by_step]


def _most(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
