"""The rows of a sweep's combinations that are impossible as configured: no process is started for them."""

from datetime import UTC, datetime

from harness.config.command import BETWEEN_ATTEMPTS, CommandConfig, read_command_config
from harness.config.fingerprint import (
    make_run_id,
    readable_id,
    short_hash,
    with_old_keys,
    without_new_defaults,
)
from harness.config.from_dict import ConfigValues
from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.records.provenance import git_commit, versions
from harness.records.rank_report import RunStatus
from harness.records.run_folder import comparison_folder
from harness.records.schema import Cells, Record
from harness.records.store import write_record
from harness.runner.record import build_record
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.runner.reuse import ensure_writable, stored_rejection
from harness.runner.simulation import machine_of_run
from harness.util.errors import UserError


def write_rejected(values: ConfigValues, reason: str) -> Record:
    """Write and return the record of a combination that cannot be run."""
    ensure_writable(comparison_folder(values["name"], values["results_dir"]))
    try:
        machine = machine_of_run(values)
        values = resolve_auto(values, machine.device, machine.compute_capability)
        config, command = resolve_run_config(values), read_command_config(values)
        return rejected_config(config, command, machine, reason)
    except UserError:
        return rejected_values(values, reason)


def rejected_config(config: RunConfig, command: CommandConfig, machine: Machine, reason: str) -> Record:
    """Write and return the record of a configuration that cannot be run on this machine."""
    world_size = config.world_size or machine.world_size
    run_id = make_run_id(config, machine.fingerprint, world_size, corpus="")
    folder = comparison_folder(command.name, command.results_dir).run(run_id)
    stored = stored_rejection(folder, command.force)
    if stored is not None:
        return stored
    ending: Cells = {"status": "refused", "reason": reason, "world_size": world_size}
    record = build_record(config, command, machine, None, run_id, ending)
    write_record(folder.path, record)
    return record


def fallback_run_id(values: ConfigValues) -> str:
    """Return the run id of values that are no valid configuration.

    Any of the values may be the invalid one, so all of them are hashed, except those that may change from one attempt
    at the combination to the next.
    """
    hashed = without_new_defaults({key: value for key, value in values.items() if key not in BETWEEN_ATTEMPTS})
    cluster = values.get("cluster")
    if isinstance(cluster, dict):  # ids are those from before there was the key, which only plans read
        hashed["cluster"] = {key: value for key, value in cluster.items() if key != "hardware"}
    names = group_names(values)
    return readable_id(names["strategy"], names["checkpointing"], names["model"], key=short_hash(with_old_keys(hashed)))


def group_names(values: ConfigValues) -> dict[str, str]:
    """Return the columns of a row that name what is run."""
    groups = {
        "model": values["model"],
        "strategy": values["strategy"],
        "checkpointing": values["checkpointing"],
        "precision": values["precision"],
    }
    return {name: str(group["name"] or group.get("family")) for name, group in groups.items()}


def rejected_values(values: ConfigValues, reason: str, status: RunStatus = "refused") -> Record:
    """Write and return the record of values that are no valid configuration, or whose job vanished."""
    run_id = fallback_run_id(values)
    comparison = comparison_folder(values["name"], values["results_dir"])
    folder = comparison.run(run_id)
    stored = stored_rejection(folder, bool(values.get("force")))
    if stored is not None:
        return stored
    ending = {"run_id": run_id, "name": comparison.path.name, "status": status, "reason": reason}
    record = Record.from_json(
        {
            "row": group_names(values) | ending | {"started_at": datetime.now(UTC).isoformat()},
            "config": values,
            "ranks": [],
            "versions": versions(),
            "commit": git_commit(),
        }
    )
    write_record(folder.path, record)
    return record
