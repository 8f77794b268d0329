"""The rows of combinations in a sweep that are impossible as configured: no process is started for them."""

from datetime import UTC, datetime
from typing import Any

from harness.config.fingerprint import make_run_id, short_hash
from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.records.provenance import git_commit, versions
from harness.records.run_folder import comparison_folder
from harness.records.schema import Record
from harness.records.store import write_record
from harness.runner.local_machine import detect_machine
from harness.runner.record import build_record
from harness.runner.resolve import resolve_run_config
from harness.runner.reuse import ensure_writable, stored_rejection
from harness.util.errors import UserError

COMMAND_KEYS = ("force", "retry", "stop_after", "sweep", "launch")  # how a command goes about it, not what it asks for


def write_rejected(values: dict[str, Any], reason: str) -> Record:
    """The row of a combination that cannot be run, written down."""
    ensure_writable(comparison_folder(values))
    try:
        config = resolve_run_config(values)
        return rejected_config(config, detect_machine(config.cluster), reason)
    except UserError:
        return rejected_values(values, reason)


def rejected_config(config: RunConfig, machine: Machine, reason: str) -> Record:
    """The row of a configuration that cannot be run here."""
    world_size = config.world_size or machine.world_size
    run_id = make_run_id(config, machine.fingerprint, world_size, corpus="")
    directory = comparison_folder(config.to_dict()) / run_id
    on_file = stored_rejection(directory, config.force)
    if on_file is not None:
        return on_file
    ending = {"status": "refused", "reason": reason, "world_size": world_size}
    record = build_record(config, machine, None, run_id, ending)
    write_record(directory, record)
    return record


def fallback_run_id(values: dict[str, Any]) -> str:
    """What such a row is called: any value may be the impossible one."""
    asked = {key: value for key, value in values.items() if key not in COMMAND_KEYS}
    return "-".join(
        (*(group_names(values)[group] for group in ("strategy", "checkpointing", "model")), short_hash(asked))
    )


def group_names(values: dict[str, Any]) -> dict[str, str]:
    groups = ("model", "strategy", "checkpointing", "precision")
    return {group: str(values[group]["name"] or values[group].get("family")) for group in groups}


def rejected_values(values: dict[str, Any], reason: str, status: str = "refused") -> Record:
    """The row of values of which no configuration can be made, or of which no node told anything."""
    run_id = fallback_run_id(values)
    folder = comparison_folder(values)
    on_file = stored_rejection(folder / run_id, bool(values.get("force")))
    if on_file is not None:
        return on_file
    ending = {"run_id": run_id, "name": folder.name, "status": status, "reason": reason}
    record: Record = {
        "row": group_names(values) | ending | {"started_at": datetime.now(UTC).isoformat()},
        "config": values,
        "ranks": [],
        "versions": versions(),
        "commit": git_commit(),
    }
    write_record(folder / run_id, record)
    return record
