"""Runs as jobs of Slurm. The truth is in files (harness.letters) and the runs' records, not in what Slurm says."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.from_dict import from_dict
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_record, write_record
from harness.runner.rejected import fallback_run_id, rejected_values
from harness.runner.resolve import resolve_run_config
from harness.runner.reuse import reusable_record
from harness.sweep.display import ProgressDisplay
from harness.sweep.micro_batch_search import candidates, wants_max_micro_batch
from harness.sweep.queued_run import QueuedRun
from harness.sweep.slurm import commands
from harness.sweep.slurm.commands import SlurmResources
from harness.sweep.slurm.mailbox import job_key, message_file, read_run_ids, submitted_job
from harness.sweep.slurm.plugin import is_selected
from harness.util.errors import UserError
from harness.util.files import atomic_write_json, atomic_write_text
from harness.util.locks import is_locked, run_lock

POLL_SECONDS = 1.0

GONE_SECONDS = 10.0  # from a job's leaving the queue to its being given up: files of a shared folder may come late


@dataclass
class SubmittedRun:
    """A combination on its way."""

    item: QueuedRun
    values: dict[str, Any]
    job: str | None = None  # 12, or 12_3 of an array; None: not submitted yet
    missing_since: float | None = None  # time.monotonic() at which the job was not in the queue any more
    begun: list[str] = field(default_factory=list)


class SlurmExecutor:
    """Submits all it is given, in arrays, and waits for the answers. Jobs outlive this command; the next finds them."""

    def __init__(self, launcher: dict[str, Any], display: ProgressDisplay) -> None:
        keys = {key: value for key, value in launcher.items() if key != "_target_"}
        self.queue: SlurmResources = (
            from_dict(SlurmResources, keys, "hydra.launcher") if is_selected(launcher) else SlurmResources()
        )
        self.display = display
        self.values: dict[QueuedRun, dict[str, Any]] = {}
        self.at_work: dict[QueuedRun, SubmittedRun] = {}
        self.polled_at = 0.0

    @property
    def max_parallel(self) -> int:
        return self.queue.array_parallelism

    def plan_item(self, values: dict[str, Any], turn: int) -> QueuedRun:
        """Its plan is its node's affair. Raises UserError if there can be no configuration."""
        config = resolve_run_config(candidates(values)[0] if wants_max_micro_batch(values) else values)
        named = (config.strategy.name, config.checkpointing.name, config.model.name, job_key(values))
        item = QueuedRun(config, None, "-".join(named), turn)
        self.values[item] = values
        return item

    def stored_record(self, item: QueuedRun) -> Record | None:
        """The record of the node's answer; of several runs the last that is ok."""
        runs = read_run_ids(message_file(item, "answer"))
        found = [reusable_record(item.config, item.folder / run, self.display.print_line) for run in runs]
        if not found or None in found:
            return None
        return best_of_search([record for record in found if record is not None])

    def can_start(self, item: QueuedRun) -> bool:
        return True

    def start(self, item: QueuedRun) -> None:
        self.at_work[item] = SubmittedRun(item, self.values[item])

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        new = [one for one in self.at_work.values() if one.job is None]
        if new:
            self.submit(new)
        time.sleep(max(0.0, self.polled_at + POLL_SECONDS - time.monotonic()))
        self.polled_at = time.monotonic()
        states = commands.squeue_states({one.job for one in self.at_work.values() if one.job})
        found: list[tuple[QueuedRun, Record | None]] = []
        for item, one in list(self.at_work.items()):
            record = self.poll_run(one, states)
            if record is not None:
                found.append((item, record))
                del self.at_work[item]
        self.display.show()
        return found

    def submit(self, new: Sequence[SubmittedRun]) -> None:
        """Every one that no other command has submitted, those of equal needs as one array."""
        folders = {one.item.folder for one in new}
        for folder in folders:
            jobs = ComparisonFolder(folder).jobs
            jobs.mkdir(parents=True, exist_ok=True)
            with run_lock(ComparisonFolder(jobs).lock("submission")):
                mine = [one for one in new if one.item.folder == folder]
                alive = commands.squeue_states({job for one in mine if (job := submitted_job(one.item))})
                if alive is None:
                    raise UserError("hydra/launcher=submitit_slurm: squeue does not say which jobs there are")
                for one in mine:
                    job = submitted_job(one.item)
                    one.job = job if job in alive else None
                fresh = [one for one in mine if one.job is None]
                for header, group in group_by_resources(self.queue, fresh):
                    self.submit_array(jobs, header, group)

    def submit_array(self, jobs: Path, header: str, group: Sequence[SubmittedRun]) -> None:
        for one in group:
            message_file(one.item, "answer").unlink(missing_ok=True)
            message_file(one.item, "begun").unlink(missing_ok=True)
            bare = one.item.folder / fallback_run_id(one.values)  # which lost() may have left
            shutil.rmtree(bare, ignore_errors=True)
            atomic_write_json(message_file(one.item), {"values": one.values, "job": None})
        works = [message_file(one.item).resolve() for one in group]
        number = commands.submit(commands.script(header, self.queue, works, jobs.resolve()), jobs)
        for index, one in enumerate(group):
            one.job = f"{number}_{index}"
            atomic_write_json(message_file(one.item), {"values": one.values, "job": one.job})
        self.display.print_line(f"Slurm job {number}: {len(group)} runs")

    def poll_run(self, one: SubmittedRun, states: dict[str, str] | None) -> Record | None:
        """Its record, if its node answered or its job is gone without."""
        item = one.item
        one.begun = read_run_ids(message_file(item, "begun")) or one.begun
        if one.begun:
            self.display.set_folder(item, item.folder / one.begun[-1])
        runs = read_run_ids(message_file(item, "answer"))
        with suppress(UserError):
            if runs:
                return best_of_search([read_record(item.folder / run) for run in runs])
        if states is None or one.job in states:  # Slurm does not answer, or has it still
            self.display.note(item, "" if states is None else states[str(one.job)].lower())
            one.missing_since = None
            return None
        if any(is_locked(ComparisonFolder(item.folder).lock(run)) for run in one.begun):  # its node is at it, whatever Slurm thinks
            return None
        one.missing_since = one.missing_since or time.monotonic()
        if time.monotonic() - one.missing_since < GONE_SECONDS:
            return None
        return record_of_vanished_job(one)

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """Nothing ends: jobs go on."""
        numbers = sorted({str(one.job).partition("_")[0] for one in self.at_work.values() if one.job})
        if numbers:
            goes = f"Slurm's jobs {', '.join(numbers)} go on; the same command waits for them, scancel ends them"
            self.display.print_line(goes)
        return []

    def close(self) -> None:
        pass


def write_scripts(place: SlurmExecutor, items: Sequence[QueuedRun]) -> list[Path]:
    """For launch=script: batch scripts to submit by hand, with the files that they name."""
    written = []
    for folder in dict.fromkeys(item.folder for item in items):
        jobs = ComparisonFolder(folder).jobs
        jobs.mkdir(parents=True, exist_ok=True)
        mine = [SubmittedRun(item, place.values[item]) for item in items if item.folder == folder]
        for number, (header, group) in enumerate(group_by_resources(place.queue, mine)):
            for one in group:
                atomic_write_json(message_file(one.item), {"values": one.values, "job": None})
            works = [message_file(one.item).resolve() for one in group]
            path = folder / ("sweep.sbatch" if number == 0 else f"sweep_{number}.sbatch")
            atomic_write_text(path, commands.script(header, place.queue, works, jobs.resolve()))
            written.append(path)
    return written


def group_by_resources(
    asked: SlurmResources, group: Sequence[SubmittedRun]
) -> Iterator[tuple[str, list[SubmittedRun]]]:
    """Those of equal needs, as many as Slurm takes at once, with the lines that say the needs."""
    by_needs: dict[str, list[SubmittedRun]] = {}
    for one in group:
        by_needs.setdefault(commands.sbatch_directives(asked, one.item.config), []).append(one)
    for header, alike in by_needs.items():
        for first in range(0, len(alike), commands.MOST_IN_ARRAY):
            yield header, alike[first : first + commands.MOST_IN_ARRAY]


def best_of_search(found: Sequence[Record]) -> Record:
    """Of a search's runs the last that is ok, else the last."""
    ok = [record for record in found if record["row"]["status"] == "ok"]
    return (ok or list(found))[-1]


ENDS = {"CANCELLED": "interrupted", "PREEMPTED": "interrupted", "TIMEOUT": "timeout", "OUT_OF_MEMORY": "oom"}


def record_of_vanished_job(one: SubmittedRun) -> Record:
    """The row of a run whose job ended without its word: what Slurm says of the job."""
    state = commands.final_state(str(one.job))
    ending = {
        "status": ENDS.get(state, "error"),
        "reason": f"Slurm's job {one.job} ended as {state or 'unknown'} before its node had recorded the run",
    }
    record = finalize_record(one, ending)
    if ending["status"] != "interrupted":  # which the next command makes again; the rest stands as other ends do
        atomic_write_json(message_file(one.item, "answer"), {"runs": [record["row"]["run_id"]]})
    return record


def finalize_record(one: SubmittedRun, ending: dict[str, str]) -> Record:
    """The row that its node had begun, with that end; a bare one if it had not come so far."""
    for run in reversed(one.begun):
        with suppress(UserError):
            record = read_record(one.item.folder / run)
            if record["row"]["status"] == "interrupted":
                write_record(one.item.folder / run, record | {"row": record["row"] | ending})
            return read_record(one.item.folder / run)
    return rejected_values(one.values, ending["reason"], ending["status"])
