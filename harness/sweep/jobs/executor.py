"""The executor that makes runs as jobs of a cluster.

It relies on files (harness.sweep.jobs.job) and on the runs' records more than on what a cluster says of its jobs.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress

from harness.config.command import read_command_config
from harness.config.fingerprint import readable_id, result_affecting_keys, short_hash, with_old_keys
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.config.schema import ClusterConfig
from harness.launcher.multinode import create_token
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Cells, Record
from harness.records.store import read_record, write_record
from harness.runner.record import fallback_run_id, rejected_values
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.runner.reuse import reusable_record
from harness.sweep.display import ProgressDisplay
from harness.sweep.jobs.clusters import job_cluster
from harness.sweep.jobs.job import JobEnd, JobRun, submitted_job
from harness.sweep.queued_run import Ended, QueuedRun, candidates, wants_max_micro_batch
from harness.util.files import atomic_write_json
from harness.util.locks import file_lock, is_locked
from harness.util.text import UserError

POLL_SECONDS = 1.0

GONE_SECONDS = 10.0  # from when a job left the queue until it is given up: files in a shared folder may appear late


class JobExecutor:
    """The executor that submits all its runs and waits for the answers, or writes the files of their jobs.

    Jobs outlive this command, and the next command finds them again.
    """

    def __init__(self, launcher: GroupValues, display: ProgressDisplay) -> None:
        self.launcher, self.display = launcher, display
        self.cluster = job_cluster(launcher)
        self.started: list[JobRun] = []
        self.polled_at = 0.0

    @property
    def max_parallel(self) -> int:
        """The number of jobs that run at the same time."""
        return self.cluster.max_parallel

    def plan_run(self, values: ConfigValues, repeat_index: int) -> JobRun:
        """Return the run of composed values, which its node plans. Raises UserError if it is no configuration."""
        cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
        values = resolve_auto(values, self.cluster.requested_device(cluster, values.get("launch", "processes")))
        config = resolve_run_config(candidates(values)[0] if wants_max_micro_batch(values) else values)
        key = short_hash(with_old_keys(result_affecting_keys(values)))  # of all that is known before a node is assigned
        name = readable_id(config.strategy.name, config.checkpointing.name, config.model.name, key=key)
        command = read_command_config(values)
        return JobRun(config, command, None, name, repeat_index, values=values, launcher=self.launcher)

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the record that an earlier job answered with, if it can be reused."""
        records = [
            reusable_record(run.command, run.comparison.run(run_id), self.display.print_line)
            for run_id in job_run(run).read_run_ids("answer")
        ]
        reusable = [record for record in records if record is not None]
        return best_of_search(reusable) if reusable and len(reusable) == len(records) else None

    def write_files(self, runs: Sequence[QueuedRun]) -> list[str]:
        """Write the files of the jobs of runs without a record, and return the commands that submit them.

        Records are shown.
        """
        selected: list[JobRun] = []
        commands: list[str] = []
        for run in map(job_run, runs):
            record = self.stored_record(run)
            if record is None:
                selected.append(run)
            else:
                self.display.run_ended(run, record)
        for comparison in dict.fromkeys(run.comparison for run in selected):
            prepare(comparison)
            commands += self.cluster.write_files([run for run in selected if run.comparison == comparison])
        return commands

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether the cluster's queue takes another job; it waits there until nodes are free."""
        return len(self.started) < self.cluster.max_queued

    def start(self, run: QueuedRun) -> None:
        """Queue the run, which the next poll submits."""
        job = job_run(run)
        ended = job.job  # of an attempt before, which may still be in the queue although it has answered
        job.job, job.missing_since, job.started_runs = None, None, []
        if ended and submitted_job(job.message()) == ended:  # and no other command has submitted the run again
            job.write_values()
        self.started.append(job)

    def poll(self) -> Ended:
        """Submit what is new, and return the runs whose nodes answered or whose jobs vanished."""
        self.submit([run for run in self.started if run.job is None])
        time.sleep(max(0.0, self.polled_at + POLL_SECONDS - time.monotonic()))
        self.polled_at = time.monotonic()
        states = self.cluster.states({run.job for run in self.started if run.job})
        ended: Ended = []
        for run in list(self.started):
            record = self.poll_run(run, states)
            if record is not None:
                ended.append((run, record))
                self.started.remove(run)
        self.display.show()
        return ended

    def submit(self, new: Sequence[JobRun]) -> None:
        """Submit every run that no other command has submitted."""
        for comparison in {run.comparison for run in new}:
            prepare(comparison)
            with file_lock(ComparisonFolder(comparison.jobs).lock("submission")):
                selected = [run for run in new if run.comparison == comparison]
                for run in selected:
                    run.job = submitted_job(run.message())
                queued = self.cluster.states({run.job for run in selected if run.job})
                if queued is None:
                    raise UserError(
                        f"hydra/launcher={self.cluster.launcher} cannot list queued jobs, as {self.cluster.title} does"
                        " not respond: try again later"
                    )
                unsubmitted = [run for run in selected if run.job not in queued]
                for run in unsubmitted:
                    run.job = None
                    run.message("answer").unlink(missing_ok=True)
                    run.message("started").unlink(missing_ok=True)
                    fallback = comparison.run(fallback_run_id(run.values))  # of a job that vanished
                    shutil.rmtree(fallback.path, ignore_errors=True)
                self.cluster.submit(unsubmitted, self.display.print_line)

    def poll_run(self, run: JobRun, states: dict[str, str] | None) -> Record | None:
        """Return the record of a run whose node answered, or whose job vanished without an answer."""
        run.started_runs = run.read_run_ids("started") or run.started_runs
        if run.started_runs:
            self.display.set_folder(run, run.comparison.run(run.started_runs[-1]).path)
        answered = run.read_run_ids("answer")
        with suppress(UserError):
            if answered:
                return best_of_search([read_record(run.comparison.run(run_id).path) for run_id in answered])
        if states is None or run.job in states:  # the cluster does not answer, or the job is still in its queue
            self.display.set_note(run, "" if states is None else states[str(run.job)].lower())
            run.missing_since = None
            return None
        if any(is_locked(run.comparison.lock(run_id)) for run_id in run.started_runs):
            return None  # its node is working on it, whatever the cluster says
        run.missing_since = run.missing_since or time.monotonic()
        if time.monotonic() - run.missing_since < GONE_SECONDS:
            return None
        return record_of_vanished_job(run, self.cluster.title, self.cluster.end_of(str(run.job)))

    def interrupt(self) -> Ended:
        """End nothing: the jobs continue. Print how to come back to them and how to end them."""
        numbers = sorted({str(run.job).partition("_")[0] for run in self.started if run.job})
        if numbers:
            self.display.print_line(
                f"{self.cluster.title}'s jobs {', '.join(numbers)} continue: the same command waits for them,"
                f" {self.cluster.ended_by} ends them"
            )
        return []

    def close(self) -> None:
        """Do nothing: the jobs are the cluster's."""


def job_run(run: QueuedRun) -> JobRun:
    """Return a run of this executor by its type."""
    assert isinstance(run, JobRun)
    return run


def prepare(comparison: ComparisonFolder) -> None:
    """Make the folder of a comparison's messages, with the token of its nodes."""
    comparison.jobs.mkdir(parents=True, exist_ok=True)
    create_token(comparison.job_token)


def best_of_search(records: Sequence[Record]) -> Record:
    """Return the last record of a search that is ok, else the last of all."""
    ok = [record for record in records if record.status == "ok"]
    return (ok or list(records))[-1]


def record_of_vanished_job(run: JobRun, title: str, end: JobEnd) -> Record:
    """Write and return the record of a run whose job ended without an answer: what the cluster says of the job."""
    reason = f"{title}'s job {run.job} ended as {end.state} before its node had recorded the run"
    ending: Cells = {"status": end.status, "reason": reason}
    record = finalize_record(run, ending | {"ended_from_outside": end.is_outside or None})
    # A run that was interrupted or ended from outside is made again; records of other statuses are kept.
    if end.status != "interrupted" and not end.is_outside:
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
