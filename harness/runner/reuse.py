"""Whether what a comparison's folder has of a run stands, or it must be made again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from harness.config.schema import RunConfig
from harness.records.provenance import version_differences, versions
from harness.records.run_folder import ComparisonFolder, RunFolder
from harness.records.schema import Record
from harness.records.store import read_record
from harness.util.disk_reserve import reserve
from harness.util.errors import UserError
from harness.util.native_build import compiler_problem

NO_REFERENCE = "not asked for: proof.reference=false"

STARTED = "its command is gone, or still running"  # the reason of a record that its command has not yet replaced

LogFn = Callable[[str], None]


def clear_run_folder(run_dir: Path) -> None:
    """Removes what an earlier attempt at a run left, but for the record: at no moment is there a run without one."""
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != RunFolder(run_dir).record:
            path.unlink(missing_ok=True)


def ensure_writable(folder: Path) -> None:
    """Makes a comparison's folder. Raises UserError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
        reserve(ComparisonFolder(folder).reserve)
    except OSError as error:
        raise UserError(f"results_dir: {folder} cannot be written ({error.strerror}): choose another folder") from None


def reusable_record(config: RunConfig, run_dir: Path, say: LogFn) -> Record | None:
    """The record of a run that need not be made again; one that must is said, with the reason.

    A refusal is not looked for: whether it still holds is quickly found out.
    """
    if config.force or not RunFolder(run_dir).record.exists():
        return None
    try:
        record = read_record(run_dir)
    except UserError as error:
        say(f"{run_dir.name} is run again: {error}")
        return None
    status = record["row"]["status"]
    if status == "refused":
        return None
    why = reason_to_repeat(config, run_dir, record)
    if why:
        say(f"{run_dir.name} is run again, {why}")
        return None
    ended = "" if status == "ok" else f" as {status}"
    say(f"{run_dir.name} is recorded{ended}; {'force=true' if status == 'ok' else f'retry={status}'} runs it again")
    return record


def stored_rejection(run_dir: Path, force: bool) -> Record | None:
    """The refusal on file, if this code made it."""
    try:
        record = read_record(run_dir)
    except UserError:
        return None
    is_same = record["row"]["status"] == "refused" and not version_differences(record, versions())
    return record if is_same and not force else None


def reason_to_repeat(config: RunConfig, run_dir: Path, record: Record) -> str:
    status = record["row"]["status"]
    if status == "interrupted":
        return "it was interrupted"
    if status in config.retry:
        return f"it ended as {status}"
    lacking = version_differences(record, versions())
    if status == "ok":
        lacking = lacking or missing_evidence(config, run_dir, record)
    return f"its record is stale: {'; '.join(lacking)}" if lacking else ""


def missing_evidence(config: RunConfig, run_dir: Path, record: Record) -> list[str]:
    """What an `ok` record lacks of what is asked now: a comparison, a tighter bound, memory that can be counted."""
    row, asked = record["row"], config.proof
    lacking = []
    if asked.reference and record["proof"]["reference"] == NO_REFERENCE:
        lacking.append("it was not compared with a reference")
    for column, bounds in (("loss_deviation", asked.loss_bound), ("grad_deviation", asked.grad_bound)):
        value = row.get(column)
        if asked.reference and value is not None and not value <= bounds[config.precision.name]:
            lacking.append(f"{column} {value:.2e} is above the bound asked for now")
    if row["peak_allocated_bytes"] is None and compiler_problem() is None:
        lacking.append("its memory was not counted")
    if config.measure.memory_snapshot and not RunFolder(run_dir).memory_snapshot(0).exists():
        lacking.append("no snapshot of its memory was kept")
    return lacking
