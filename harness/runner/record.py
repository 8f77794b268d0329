"""The record of a run: its row, its configuration, its ranks' reports, and the machine and versions that made it."""

from collections.abc import Sequence
from datetime import UTC, datetime

from harness.config.command import CommandConfig, merge_values
from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.launcher.outcome import LaunchOutcome
from harness.launcher.rank_environment import rank_environment, threads_per_rank
from harness.layout.layout import Layout
from harness.measure.environment import collect_environment
from harness.metrics.memory import max_known
from harness.records import heartbeat
from harness.records.provenance import git_commit, versions
from harness.records.rank_report import RankReport, to_record_entry
from harness.records.run_folder import RunFolder
from harness.records.schema import Cells, Record, RecordParts
from harness.runner import preflight
from harness.runner.config_columns import config_columns


def build_record(
    config: RunConfig,
    command: CommandConfig,
    machine: Machine,
    layout: Layout | None,
    run_id: str,
    ending: Cells,
    ranks: Sequence[RankReport] = (),
    parts: RecordParts | None = None,
) -> Record:
    """Return the record of one run, which has everything that is known of it.

    `ending` has its status, reason and figures; `layout` is None where none could be resolved; `parts` are those that
    only some runs have.
    """
    row = config_columns(config, layout) | {
        "name": command.name,
        "run_id": run_id,
        "measured_on": machine.device_name,
        "memory_limit_bytes": preflight.rank_memory_limit(config, machine),
        "started_at": datetime.now(UTC).isoformat(),
    }
    local_ranks = layout.world_size // machine.nodes_needed(layout.world_size) if layout else None
    threads = local_ranks and threads_per_rank(local_ranks)
    variables = rank_environment(machine.device, local_ranks) if local_ranks else {}
    return Record.from_json(
        {
            "row": row | ending,
            "config": merge_values(config, command),
            "layout": layout.to_dict() if layout else None,
            "ranks": [to_record_entry(rank) for rank in ranks],
            "environment": collect_environment(machine, threads, variables),
            "versions": versions(),
            "commit": git_commit(),
            **(parts or {}),
        }
    )


def failure_columns(
    config: RunConfig, folder: RunFolder, world_size: int, outcome: LaunchOutcome, ranks: Sequence[RankReport]
) -> Cells:
    """Return the columns of a run that failed: its phase, and the most memory that a rank last reported.

    The phase is that of the rank to blame, else of the rank that is furthest behind. A rank that ran out of memory
    makes an error an `oom`.
    """
    exhausted = next((rank for rank in ranks if rank.status == "oom"), None)
    beats = {rank: beat for rank in range(world_size) if (beat := heartbeat.read_heartbeat(folder.path, rank))}
    blamed = exhausted.rank if exhausted else next((failure.rank for failure in outcome.failures), None)
    if blamed not in beats:
        blamed = min(beats, key=lambda rank: beats[rank].step, default=None)
    row: Cells = {"failed_in_phase": beats[blamed].phase if blamed in beats else None}
    row["last_seen_allocated_bytes"] = max_known(beat.allocated_bytes for beat in beats.values())
    row["last_seen_rss_bytes"] = max_known(beat.host_bytes for beat in beats.values())
    if outcome.status == "error" and exhausted:
        row["status"] = "oom"
        row["reason"] = out_of_memory_reason(config, exhausted)
    return row


def out_of_memory_reason(config: RunConfig, rank: RankReport) -> str:
    """Return the reason of a run in which this rank ran out of memory."""
    budget = config.cluster.memory_budget
    under = "" if budget is None else f" under cluster.memory_budget={budget}"
    return f"rank {rank.rank} ran out of memory in phase {rank.phase}{under}: {rank.reason}"
