"""From what the ranks wrote down to one row: maxima over ranks, the whole world's speed, the whole step's time."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import job, launch, memory_budget, pulse, versions
from harness.config import PROFILED_STEPS, TRACED_STEPS, RunConfig
from harness.figures import Row
from harness.figures.cost import cost
from harness.figures.disturbance import disturbances
from harness.figures.kernels import kernels
from harness.figures.memory import fullest, memory, most
from harness.figures.speed import speed
from harness.figures.time import bubble, step_seconds, time
from harness.figures.traffic import sent_bytes
from harness.layout import Layout
from harness.machine import Machine
from harness.measure.environment import environment
from harness.outcome import Outcome
from harness.placement import stages
from harness.proof import Rank
from harness.records import Record
from harness.sizes import parameter_count

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
        "memory_limit_bytes": memory_budget.limit_bytes(config, machine),
        "started_at": datetime.now(UTC).isoformat(),
    }
    local_ranks = layout.world_size // machine.nodes_of(layout.world_size) if layout else None
    threads = local_ranks and launch.threads_per_rank(local_ranks)
    given = launch.rank_environment(machine.device, local_ranks) if local_ranks else {}
    return {
        "row": whole | ending,
        "config": config.to_dict(),
        "layout": layout.to_dict() if layout else None,
        "ranks": [{key: value for key, value in rank.items() if key not in _LONG} for rank in ranks],
        "environment": environment(machine, threads, given),
        "versions": versions.versions(),
        "commit": versions.git_commit(),
        **(extra or {}),
    }


def configured(config: RunConfig, layout: Layout | None) -> Row:
    """The columns known before anything runs; degrees are empty where the layout could not be resolved."""
    row: Row = {
        "name": config.name,
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "attention": config.model.attention,
        "dropout": config.model.dropout,
        "strategy": config.strategy.name,
        "engine": config.strategy.engine,
        "data_parallel": config.strategy.data_parallel,
        "checkpointing": config.checkpointing.name,
        "offload": config.strategy.offload,
        "offload_activations": config.checkpointing.offload_activations,
        "precision": config.precision.name,
        "zero_stage": config.strategy.zero_stage,
        "micro_batch": config.train.micro_batch,
        "global_batch": config.train.global_batch,
        "seq_len": config.train.seq_len,
        "loss_chunks": config.train.loss_chunks,
        "compile": config.train.compile,
        "fused_optimizer": config.train.fused_optimizer,
        "checkpointing_every": config.checkpointing.every if config.checkpointing.every > 1 else None,
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
            row["vocabulary_parallel"] = layout.vocabulary_parallel
    return row


def read_ranks(run_dir: Path, world_size: int) -> list[Rank]:
    """The rank files there are, whole or not written at all."""
    paths = [job.rank_file(run_dir, rank) for rank in range(world_size)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def ended(config: RunConfig, run_dir: Path, world_size: int, outcome: Outcome, ranks: Sequence[Rank]) -> Row:
    """The columns of a run that did not come to its end: where it stood and what its ranks held, as each said last.

    The phase is that of the rank to blame, else of the one furthest behind.
    """
    exhausted = next((rank for rank in ranks if rank["status"] == "oom"), None)
    beats = {rank: beat for rank in range(world_size) if (beat := pulse.read(run_dir, rank))}
    blamed = exhausted["rank"] if exhausted else next((failure.rank for failure in outcome.failures), None)
    if blamed not in beats:
        blamed = min(beats, key=lambda rank: beats[rank].step, default=None)
    row: Row = {"phase": beats[blamed].phase if blamed in beats else None}
    for quantity in ("allocated_bytes", "host_bytes"):
        row[f"last_{quantity}"] = most(getattr(beat, quantity) for beat in beats.values())
    if outcome.status == "error" and exhausted:
        row["status"] = "oom"
        budget = config.cluster.memory_budget
        under = "" if budget is None else f" under cluster.memory_budget={budget}"
        row["reason"] = f"rank {exhausted['rank']} in {exhausted['phase']}{under}: {exhausted['reason']}"
    return row


def measured(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> Row:
    """The columns of a finished run. Memory is the maximum over ranks; a step is as long as its slowest rank."""
    losses = mean_losses(ranks)
    times = time(layout, ranks)
    seen_whole = all(rank["devices"] == 1 for rank in ranks)
    return {
        **speed(config, ranks, times["step_seconds"]),
        **times,
        **memory(ranks),
        **cost(config, ranks),
        **kernels(config, ranks),
        "disturbed": disturbances(step_seconds(ranks), [rank["used"] for rank in ranks]),
        "communication_bytes": round(max(map(sent_bytes, ranks))) if seen_whole else None,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "skipped_steps": max(rank["skipped_steps"] for rank in ranks),
        "in_flight": most(rank["profiled"]["in_flight"] for rank in ranks),
        "measured_on": fullest(ranks)["device_name"],
        **bubble(config, layout, ranks),
    }


def steps(config: RunConfig, ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """One entry a step for steps.jsonl: the world's mean loss, the global gradient norm, the slowest rank's time."""
    losses, norms = mean_losses(ranks), ranks[0]["grad_norms"]
    seconds, phases = step_seconds(ranks), phases_of_steps(config)
    times = [None] * config.train.warmup_steps + seconds + [None] * (TRACED_STEPS + PROFILED_STEPS)
    return [
        {"step": step, "phase": phase, "loss": loss, "grad_norm": norm, "seconds": time}
        for step, (phase, loss, norm, time) in enumerate(zip(phases, losses, norms, times, strict=True))
    ]


def phases_of_steps(config: RunConfig) -> list[str]:
    counts = {
        "warm-up": config.train.warmup_steps,
        "timed": config.train.steps,
        "traced": TRACED_STEPS,
        "profiled": PROFILED_STEPS,
    }
    return [phase for phase, steps in counts.items() for _ in range(steps)]


def mean_losses(ranks: Sequence[Rank]) -> list[float | None]:
    """Of every step over the ranks; None where one is not finite."""
    by_step = zip(*(rank["losses"] for rank in ranks), strict=True)
    return [None if None in losses else sum(losses) / len(losses) for losses in by_step]
