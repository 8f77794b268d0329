"""The rows of combinations in a sweep that are impossible as configured: no process is started for them."""

from datetime import UTC, datetime
from typing import Any

from harness import records, row, stored, versions
from harness.compose import folder_of, run_config
from harness.config import RunConfig
from harness.errors import UserError
from harness.identity import digest, run_id_of
from harness.machine import Machine, look
from harness.records import Record

STEERING = ("force", "retry", "stop_after", "sweep", "launch")  # how a command goes about it, not what it asks for


def row_of(values: dict[str, Any], reason: str) -> Record:
    """The row of a combination that cannot be run, written down."""
    stored.writable(folder_of(values))
    try:
        config = run_config(values)
        return combination(config, look(config.cluster), reason)
    except UserError:
        return values_only(values, reason)


def combination(config: RunConfig, machine: Machine, reason: str) -> Record:
    """The row of a configuration that cannot be run here."""
    world_size = config.world_size or machine.world_size
    run_id = run_id_of(config, machine.kind, world_size, corpus="")
    directory = folder_of(config.to_dict()) / run_id
    on_file = stored.refusal(directory, config.force)
    if on_file is not None:
        return on_file
    ending = {"status": "refused", "reason": reason, "world_size": world_size}
    record = row.record(config, machine, None, run_id, ending)
    records.write_record(directory, record)
    return record


def bare_id(values: dict[str, Any]) -> str:
    """What such a row is called: any value may be the impossible one."""
    asked = {key: value for key, value in values.items() if key not in STEERING}
    return "-".join((*(names_of(values)[group] for group in ("strategy", "checkpointing", "model")), digest(asked)))


def names_of(values: dict[str, Any]) -> dict[str, str]:
    groups = ("model", "strategy", "checkpointing", "precision")
    return {group: str(values[group]["name"] or values[group].get("family")) for group in groups}


def values_only(values: dict[str, Any], reason: str, status: str = "refused") -> Record:
    """The row of values of which no configuration can be made, or of which no node told anything."""
    run_id = bare_id(values)
    folder = folder_of(values)
    on_file = stored.refusal(folder / run_id, bool(values.get("force")))
    if on_file is not None:
        return on_file
    ending = {"run_id": run_id, "name": folder.name, "status": status, "reason": reason}
    record: Record = {
        "row": names_of(values) | ending | {"started_at": datetime.now(UTC).isoformat()},
        "config": values,
        "ranks": [],
        "versions": versions.versions(),
        "commit": versions.git_commit(),
    }
    records.write_record(folder / run_id, record)
    return record
