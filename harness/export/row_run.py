"""A run of which a table alone has the row, as a run that is exported: composed again from the command that made it."""

import shlex
from contextlib import suppress
from pathlib import Path

from harness.config.hydra import compose_values
from harness.config.schema import Device
from harness.data.corpus import prepare_corpus
from harness.export.recorded_run import RecordedRun
from harness.layout.layout import resolve_layout
from harness.planner.plan import combinations
from harness.records.run_folder import RunFolder, RunSpec
from harness.records.schema import Row
from harness.records.store import read_runs
from harness.runner.config_columns import config_columns
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.util.text import UserError


def row_alone(directory: Path) -> Row | None:
    """Return the row that a table has of a run whose folder has no record; None if there is none."""
    rows = (
        [] if RunFolder(directory).record.exists() or not directory.parent.is_dir() else read_runs(directory.parent)[0]
    )
    return next((record.row for record in rows if record.is_row_alone and record.run_id == directory.name), None)


def row_run(row: Row, target: Path | None) -> RecordedRun:
    """Return the run of a row.

    Raises UserError if it did not end ok, or if its command does not describe it any more.
    """
    run_id = row["run_id"]
    device: Device = "cpu" if row.get("measured_on") == "cpu" else "cuda"
    if row["status"] != "ok":
        raise UserError(f"{run_id} has status={row['status']}, and only what ran is exported: choose an ok run")
    if target is None:
        raise UserError(f"{run_id} has no folder for its export: add --to DIR")
    for plan in combinations(shlex.split(str(row.get("command") or "harness"))[1:]):
        with suppress(UserError):  # of a combination that is refused
            config = resolve_run_config(resolve_auto(compose_values(*plan.overrides), device))
            layout = resolve_layout(config.strategy, row["world_size"])
            columns = config_columns(config, layout)
            # A table may be older than a column.
            if all(row.get(name, value) == value for name, value in columns.items() if name != "repeat"):
                corpus = prepare_corpus(config.data, config.train.seq_len)
                spec = RunSpec(run_id, config, layout, corpus, device, threads=1)
                return RecordedRun(target.resolve(), target.resolve(), spec)
    raise UserError(f"no configuration of `{row.get('command')}` is that of {run_id} today: export it by --plan")
