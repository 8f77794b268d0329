"""The executor that makes runs as jobs of Slurm.

It relies on files (harness.sweep.slurm.commands) and on the runs' records more than on what Slurm says of its jobs.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.config.command import read_command_config
from harness.config.fingerprint import readable_id, result_affecting_keys, short_hash, with_old_keys
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.config.schema import ClusterConfig
from harness.launcher.multinode import create_token
from harness.records.rank_report import RunStatus
from harness.records.run_folder import ComparisonFolder, is_run_id
from harness.records.schema import Cells, Record
from harness.records.store import read_record, write_record
from harness.runner.record import fallback_run_id, rejected_values
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.runner.reuse import reusable_record
from harness.sweep.display import ProgressDisplay
from harness.sweep.queued_run import Ended, QueuedRun, candidates, wants_max_micro_batch
from harness.sweep.slurm import commands
from harness.sweep.slurm.commands import SlurmResources, submitted_job
from harness.util.files import atomic_write_json, atomic_write_text, read_json_object
from harness.util.locks import file_lock, is_locked
from harness.util.redact import keys_holding_secrets
from harness.util.text import UserError, count_text

POLL_SECONDS = 1.0

GONE_SECONDS = 10.0  # from when a job left the queue until it is given up: files in a shared folder may appear late


@dataclass(eq=False, kw_only=True)
class JobRun(QueuedRun):
    """A combination to be run by a job."""

    values: ConfigValues
    job: str | None = None  # 12, or 12_3 of an array; None: not submitted yet
    missing_since: float | None = None  # time.monotonic() at which the job was not in the queue any more
    started_runs: list[str] = field(default_factory=list)  # run ids

    def message(self, kind: str = "") -> Path:
        """Return the file of the combination's values, or of its node's message of kind `started` or `answer`."""
        return self.comparison.jobs / f"{self.name}{kind and '.'}{kind}.json"

    def read_run_ids(self, kind: str) -> list[str]:
        """Return the runs that the node's message of this kind names; none if there is no message."""
        runs = read_json_object(self.message(kind)).get("runs")
        return list(filter(is_run_id, runs)) if isinstance(runs, list) else []

    def write_values(self) -> None:
        """Write the combination's values, which its node reads, and the job that it was submitted as."""
        create_token(self.comparison.job_token)
        atomic_write_json(self.message(), {"values": self.values, "job": self.job})


class SlurmExecutor:
    """The executor that submits all its runs, in arrays, and waits for the answers.

    Jobs outlive this command, and the next command finds them again.
    """

    def __init__(self, launcher: GroupValues, display: ProgressDisplay) -> None:
        keys = {key: value for key, value in launcher.items() if key != "_target_"}
        for key in keys_holding_secrets(keys, "hydra.launcher"):
            raise UserError(
                f"{key} holds a secret, which the batch script would store: set it in the environment, which sbatch"
                " passes on, or in a file that a line of hydra.launcher.setup reads"
            )
        self.resources = from_dict(SlurmResources, keys, "hydra.launcher")
        self.display = display
        self.started: list[JobRun] = []
        self.polled_at = 0.0

    @property
    def max_parallel(self) -> int:
        """The number of jobs that run at the same time."""
        return self.resources.array_parallelism

    def plan_run(self, values: ConfigValues, repeat_index: int) -> JobRun:
        """Return the run of composed values, which its node plans. Raises UserError if it is no configuration."""
        cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
        launch = values.get("launch", "processes")
        values = resolve_auto(values, commands.requested_device(self.resources, cluster, launch))
        config = resolve_run_config(candidates(values)[0] if wants_max_micro_batch(values) else values)
        key = short_hash(with_old_keys(result_affecting_keys(values)))  # of all that is known before a node is assigned
        name = readable_id(config.strategy.name, config.checkpointing.name, config.model.name, key=key)
        return JobRun(config, read_command_config(values), None, name, repeat_index, values=values)

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the record that an earlier job answered with, if it can be reused."""
        records = [
            reusable_record(run.config, run.command, run.comparison.run(run_id), self.display.print_line)
            for run_id in job_run(run).read_run_ids("answer")
        ]
        reusable = [record for record in records if record is not None]
        return best_of_search(reusable) if reusable and len(reusable) == len(records) else None

    def can_start(self, run: QueuedRun) -> bool:
        """Return True: Slurm queues what cannot run yet."""
        return True

    def start(self, run: QueuedRun) -> None:
        """Queue the run, which the next poll submits."""
        job = job_run(run)
        job.job, job.missing_since, job.started_runs = None, None, []  # of an attempt before
        self.started.append(job)

    def poll(self) -> Ended:
        """Submit what is new, and return the runs whose nodes answered or whose jobs vanished."""
        self.submit([run for run in self.started if run.job is None])
        time.sleep(max(0.0, self.polled_at + POLL_SECONDS - time.monotonic()))
        self.polled_at = time.monotonic()
        states = commands.squeue_states({run.job for run in self.started if run.job})
        ended: Ended = []
        for run in list(self.started):
            record = self.poll_run(run, states)
            if record is not None:
                ended.append((run, record))
                self.started.remove(run)
        self.display.show()
        return ended

    def submit(self, new: Sequence[JobRun]) -> None:
        """Submit every run that no other command has submitted; those that request the same are one array."""
        for comparison in {run.comparison for run in new}:
            comparison.jobs.mkdir(parents=True, exist_ok=True)
            with file_lock(ComparisonFolder(comparison.jobs).lock("submission")):
                selected = [run for run in new if run.comparison == comparison]
                for run in selected:
                    run.job = submitted_job(run.message())
                queued = commands.squeue_states({run.job for run in selected if run.job})
                if queued is None:
                    raise UserError(
                        "hydra/launcher=slurm: squeue does not respond, so that it is unknown which jobs are queued:"
                        " try again later"
                    )
                unsubmitted = [run for run in selected if run.job not in queued]
                for run in unsubmitted:
                    run.job = None
                    run.message("answer").unlink(missing_ok=True)
                    run.message("started").unlink(missing_ok=True)
                    fallback = comparison.run(fallback_run_id(run.values))  # of a job that vanished
                    shutil.rmtree(fallback.path, ignore_errors=True)
                for script, group in batch_scripts(self.resources, unsubmitted):
                    self.submit_array(script, group)

    def submit_array(self, script: str, group: Sequence[JobRun]) -> None:
        """Submit the batch script of runs that request the same resources."""
        number = commands.submit(script, group[0].comparison.jobs)
        for index, run in enumerate(group):
            run.job = f"{number}_{index}"
            run.write_values()
        self.display.print_line(f"Slurm job {number}: {count_text(len(group), 'run')}")

    def poll_run(self, run: JobRun, states: dict[str, str] | None) -> Record | None:
        """Return the record of a run whose node answered, or whose job vanished without an answer."""
        run.started_runs = run.read_run_ids("started") or run.started_runs
        if run.started_runs:
            self.display.set_folder(run, run.comparison.run(run.started_runs[-1]).path)
        answered = run.read_run_ids("answer")
        with suppress(UserError):
            if answered:
                return best_of_search([read_record(run.comparison.run(run_id).path) for run_id in answered])
        if states is None or run.job in states:  # Slurm does not answer, or the job is still in its queue
            self.display.set_note(run, "" if states is None else states[str(run.job)].lower())
            run.missing_since = None
            return None
        if any(is_locked(run.comparison.lock(run_id)) for run_id in run.started_runs):
            return None  # its node is working on it, whatever Slurm says
        run.missing_since = run.missing_since or time.monotonic()
        return record_of_vanished_job(run) if time.monotonic() - run.missing_since >= GONE_SECONDS else None

    def interrupt(self) -> Ended:
        """End nothing: the jobs continue. Print how to come back to them and how to end them."""
        numbers = sorted({str(run.job).partition("_")[0] for run in self.started if run.job})
        if numbers:
            self.display.print_line(
                f"Slurm's jobs {', '.join(numbers)} continue: the same command waits for them, scancel ends them"
            )
        return []

    def close(self) -> None:
        """Do nothing: the jobs are Slurm's."""


def job_run(run: QueuedRun) -> JobRun:
    """Return a run of this executor by its type."""
    assert isinstance(run, JobRun)
    return run


def write_scripts(resources: SlurmResources, runs: Sequence[QueuedRun]) -> list[Path]:
    """Write batch scripts to submit by hand, with the files of values that they name, and return the scripts."""
    paths = []
    for comparison in dict.fromkeys(run.comparison for run in runs):
        comparison.jobs.mkdir(parents=True, exist_ok=True)
        selected = [job_run(run) for run in runs if run.comparison == comparison]
        for number, (script, _) in enumerate(batch_scripts(resources, selected)):
            path = comparison.path / ("sweep.sbatch" if number == 0 else f"sweep_{number}.sbatch")
            atomic_write_text(path, script)
            paths.append(path)
    return paths


def batch_scripts(resources: SlurmResources, runs: Sequence[JobRun]) -> Iterator[tuple[str, list[JobRun]]]:
    """Yield batch scripts of a comparison's runs that request the same, as many as one array may have, with the runs.

    The files of values that a script names are written before.
    """
    groups: dict[str, list[JobRun]] = {}
    for run in runs:
        directives = commands.sbatch_directives(resources, run.config, run.command)
        groups.setdefault(directives, []).append(run)
    for directives, same in groups.items():
        for first in range(0, len(same), commands.MOST_IN_ARRAY):
            group = same[first : first + commands.MOST_IN_ARRAY]
            for run in group:
                run.write_values()
            files = [run.message().resolve() for run in group]
            yield commands.batch_script(directives, resources, files, group[0].comparison.jobs.resolve()), group


def best_of_search(records: Sequence[Record]) -> Record:
    """Return the last record of a search that is ok, else the last of all."""
    ok = [record for record in records if record.status == "ok"]
    return (ok or list(records))[-1]


STATUS_BY_STATE: dict[str, RunStatus] = {
    "CANCELLED": "interrupted",
    "PREEMPTED": "interrupted",
    "TIMEOUT": "timeout",
    "OUT_OF_MEMORY": "oom",
}


OUTSIDE_STATES = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def record_of_vanished_job(run: JobRun) -> Record:
    """Write and return the record of a run whose job ended without an answer: what Slurm says of the job."""
    state = commands.final_state(str(run.job))
    reason = f"Slurm's job {run.job} ended as {state or 'unknown'} before its node had recorded the run"
    is_outside = state in OUTSIDE_STATES
    ending: Cells = {"status": STATUS_BY_STATE.get(state, "error"), "reason": reason}
    record = finalize_record(run, ending | {"ended_from_outside": is_outside or None})
    # A run that was interrupted or ended from outside is made again; records of other statuses are kept.
    if ending["status"] != "interrupted" and not is_outside:
        atomic_write_json(run.message("answer"), {"runs": [record.run_id]})
    return record


def finalize_record(run: JobRun, ending: Cells) -> Record:
    """Give the record that the node had started these columns; without one, write a bare record."""
    for run_id in reversed(run.started_runs):
        path = run.comparison.run(run_id).path
        with suppress(UserError):
            record = read_record(path)
            if record.status == "interrupted":
                record = record.with_row(**ending)
                write_record(path, record)
            return record
    return rejected_values(run.values, **ending)
