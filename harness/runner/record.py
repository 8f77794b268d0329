"""From what the ranks wrote down to one row: maxima over ranks, the whole world's speed, the whole step's time."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.launcher.launch import rank_environment, threads_per_rank
from harness.launcher.outcome import LaunchOutcome
from harness.layout.layout import Layout
from harness.layout.parameters import parameter_count
from harness.layout.partition import split_into_stages
from harness.measure.environment import collect_environment
from harness.metrics.memory import max_known
from harness.records import heartbeat
from harness.records.provenance import git_commit, versions
from harness.records.schema import Rank, Record, Row
from harness.runner import preflight

# What stays in the rank files alone: long lists that only the proof reads.
_LONG = (
    *("parameters", "optimizer", "first_gradients", "first_moments", "last_gradients"),
    *("last_parameters", "last_masters", "phase_seconds", "traceback"),
)


def build_record(
    config: RunConfig,
    machine: Machine,
    layout: Layout | None,
    run_id: str,
    ending: Row,
    ranks: Sequence[Rank] = (),
    extra: dict[str, Any] | None = None,
) -> Record:
    """Everything known of one run; `ending` holds its status, reason and figures. layout is None if there is none."""
    whole = config_columns(config, layout) | {
        "run_id": run_id,
        "measured_on": machine.device_name,
        "memory_limit_bytes": preflight.rank_memory_limit(config, machine),
        "started_at": datetime.now(UTC).isoformat(),
    }
    local_ranks = layout.world_size // machine.nodes_needed(layout.world_size) if layout else None
    threads = local_ranks and threads_per_rank(local_ranks)
    given = rank_environment(machine.device, local_ranks) if local_ranks else {}
    return {
        "row": whole | ending,
        "config": config.to_dict(),
        "layout": layout.to_dict() if layout else None,
        "ranks": [{key: value for key, value in rank.items() if key not in _LONG} for rank in ranks],
        "environment": collect_environment(machine, threads, given),
        "versions": versions(),
        "commit": git_commit(),
        **(extra or {}),
    }


def config_columns(config: RunConfig, layout: Layout | None) -> Row:
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
        row["grad_accumulation"] = layout.grad_accumulation_steps(config.train)
        if layout.pp > 1:
            split = [str(stage.layers) for stage in split_into_stages(config.model, layout)]
            row |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
            row["layers_per_stage"] = "-".join(split)
        if layout.tp > 1:
            row["sequence_parallel"] = layout.sequence_parallel
            row["vocabulary_parallel"] = layout.vocabulary_parallel
    return row


def failure_columns(
    config: RunConfig, run_dir: Path, world_size: int, outcome: LaunchOutcome, ranks: Sequence[Rank]
) -> Row:
    """The columns of a run that did not come to its end: where it stood and what its ranks held, as each said last.

    The phase is that of the rank to blame, else of the one furthest behind.
    """
    exhausted = next((rank for rank in ranks if rank["status"] == "oom"), None)
    beats = {rank: beat for rank in range(world_size) if (beat := heartbeat.read_heartbeat(run_dir, rank))}
    blamed = exhausted["rank"] if exhausted else next((failure.rank for failure in outcome.failures), None)
    if blamed not in beats:
        blamed = min(beats, key=lambda rank: beats[rank].step, default=None)
    row: Row = {"phase": beats[blamed].phase if blamed in beats else None}
    for quantity in ("allocated_bytes", "host_bytes"):
        row[f"last_{quantity}"] = max_known(getattr(beat, quantity) for beat in beats.values())
    if outcome.status == "error" and exhausted:
        row["status"] = "oom"
        budget = config.cluster.memory_budget
        under = "" if budget is None else f" under cluster.memory_budget={budget}"
        row["reason"] = f"rank {exhausted['rank']} in {exhausted['phase']}{under}: {exhausted['reason']}"
    return row
