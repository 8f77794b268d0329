"""Reuse of stored records: whether the record in a run's folder is still valid, or the run must be repeated."""

import os
import shutil
from collections.abc import Callable

from harness.config.command import CommandConfig
from harness.measure.environment import changed_settings
from harness.records.provenance import version_differences
from harness.records.run_folder import ComparisonFolder, RunFolder
from harness.records.schema import Cells, Record
from harness.records.store import read_record
from harness.util.files import reserve
from harness.util.native_build import compiler_problem
from harness.util.text import UserError

NO_REFERENCE = "none: proof.reference=false"  # stored in records, which are compared with it

_NO_REFERENCE_TEXTS = (NO_REFERENCE, "not asked for: proof.reference=false")  # the second is that of older records

# The reason of a record that its command has not replaced yet.
STARTED = "the command that started it has exited or is still running"


def clear_run_folder(folder: RunFolder) -> None:
    """Remove what an earlier attempt left in a run's folder, except the record: a run is never without one."""
    for path in folder.path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != folder.record:
            path.unlink(missing_ok=True)


def ensure_writable(comparison: ComparisonFolder) -> None:
    """Make a comparison's folder and its disk reserve. Raises UserError if nothing can be written there."""
    folder = comparison.path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
        reserve(comparison.reserve)
    except OSError as error:
        raise UserError(f"results_dir: {folder} cannot be written ({error.strerror}): choose another folder") from None


def reusable_record(
    command: CommandConfig, folder: RunFolder, log: Callable[[str], None] = lambda _: None
) -> Record | None:
    """Return the stored record of a run that need not be repeated; log why it is reused or is not.

    A refusal is never reused here, because checking again whether it still applies takes only a moment.
    """
    if command.force or not folder.record.exists():
        return None
    run_id = folder.path.name
    try:
        record = read_record(folder.path)
    except UserError as error:
        log(f"{run_id} is run again: {error}")
        return None
    status = record.status
    if status == "refused":
        return None
    reason = reason_to_repeat(command, folder, record)
    if reason:
        log(f"{run_id} is run again, {reason}")
        return None
    ended = "" if status == "ok" else f" as {status}"
    changed = changed_settings(record.environment.get("variables", {}))
    ended += f", with another {', '.join(changed)} in its environment" if changed else ""
    log(f"{run_id} is recorded{ended}; {'force=true' if status == 'ok' else f'retry={status}'} runs it again")
    return record


def stored_rejection(folder: RunFolder, force: bool) -> Record | None:
    """Return the stored record of a refused run if the same versions of the code wrote it, unless `force`."""
    try:
        record = read_record(folder.path)
    except UserError:
        return None
    is_same = record.status == "refused" and not version_differences(record)
    return record if is_same and not force else None


def reason_to_repeat(command: CommandConfig, folder: RunFolder, record: Record) -> str:
    """Return why a recorded run must be repeated; '' if it need not be."""
    status = record.status
    if status == "interrupted":
        return "it was interrupted"
    if status in command.retry:
        return f"it ended as {status}"
    if status == "error" and record.row.get("ended_from_outside"):
        return "it was ended from outside"
    lacking = version_differences(record)
    if status == "ok":
        lacking = lacking or missing_evidence(command, folder, record)
    return f"its record is stale: {'; '.join(lacking)}" if lacking else ""


def earlier_attempts(folder: RunFolder) -> Cells:
    """Return the columns on the attempts at a run before one that starts now, by the record that the last one left."""
    try:
        row = read_record(folder.path).row
    except UserError:
        return {"attempts": 1}
    if row["status"] != "interrupted" and not row.get("ended_from_outside"):
        return {"attempts": 1}
    reason = "its command was killed" if row["reason"] == STARTED else row["reason"].partition(";")[0]
    ends = "; ".join(filter(None, (row.get("earlier_ends"), reason)))
    return {"attempts": (row.get("attempts") or 1) + 1, "earlier_ends": ends}


def missing_evidence(command: CommandConfig, folder: RunFolder, record: Record) -> list[str]:
    """Return what an `ok` record lacks that this command requires: a comparison, a tighter bound, counted memory."""
    proof = command.proof
    judged_by = record.proof.get("floor_multiple", proof.floor_multiple)
    is_alone = record.proof.get("reference") in _NO_REFERENCE_TEXTS
    snapshot = folder.memory_snapshot(0)
    rules = {
        "it was not compared with a reference": proof.reference and is_alone,
        f"it was allowed {judged_by:g} noise floors and not {proof.floor_multiple:g}": (
            proof.reference and judged_by > proof.floor_multiple
        ),
        "its memory was not counted": record.row["peak_allocated_bytes"] is None and compiler_problem() is None,
        "it has no memory snapshot": command.measure.memory_snapshot and not snapshot.exists(),
    }
    return [lack for lack, is_lacking in rules.items() if is_lacking]
