"""Slurm's queue: runs that request the same are one array of jobs."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.config.from_dict import GroupValues, from_dict
from harness.config.schema import ClusterConfig
from harness.records.rank_report import RunStatus
from harness.sweep.jobs.job import JobCluster, JobEnd, JobRun, NodeRequest
from harness.sweep.slurm import commands
from harness.sweep.slurm.commands import SlurmResources
from harness.util.files import atomic_write_text
from harness.util.text import count_text

STATUS_BY_STATE: dict[str, RunStatus] = {
    "CANCELLED": "interrupted",
    "PREEMPTED": "interrupted",
    "TIMEOUT": "timeout",
    "OUT_OF_MEMORY": "oom",
}

OUTSIDE_STATES = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


class SlurmQueue(JobCluster):
    """Slurm, to which jobs are submitted in arrays, or for which batch scripts are written."""

    launcher, title, ended_by = "slurm", "Slurm", "scancel"

    def __init__(self, keys: GroupValues) -> None:
        self.resources = from_dict(SlurmResources, keys, "hydra.launcher")
        self.submits, self.max_parallel = self.resources.submit, self.resources.array_parallelism

    def request(self, cluster: ClusterConfig, launch: str) -> NodeRequest:
        """Return what a job requests of each node. Raises UserError if GPUs are wanted and nothing says how many."""
        return commands.request_of(self.resources, cluster, launch)

    def write_files(self, runs: Sequence[JobRun]) -> list[str]:
        """Write batch scripts with the files of values that they name, and return the commands that submit them."""
        paths: list[Path] = []
        for number, (script, _) in enumerate(batch_scripts(self.resources, runs)):
            paths.append(runs[0].comparison.path / ("sweep.sbatch" if number == 0 else f"sweep_{number}.sbatch"))
            atomic_write_text(paths[-1], script)
        return [f"sbatch {shlex.quote(str(path))}" for path in paths]

    def submit(self, runs: Sequence[JobRun], log: Callable[[str], None]) -> None:
        """Submit the batch scripts of a comparison's runs. Raises UserError with sbatch's own message."""
        for script, group in batch_scripts(self.resources, runs):
            number = commands.submit(script, group[0].comparison.jobs)
            for index, run in enumerate(group):
                run.job = f"{number}_{index}"
                run.write_values()
            log(f"Slurm job {number}: {count_text(len(group), 'run')}")

    def states(self, jobs: set[str]) -> dict[str, str] | None:
        """Return the states of those jobs that are still in the queue; None if Slurm does not answer."""
        return commands.squeue_states(jobs)

    def end_of(self, job: str) -> JobEnd:
        """Return how a job ended, by scontrol."""
        state = commands.final_state(job)
        return JobEnd(state or "unknown", STATUS_BY_STATE.get(state, "error"), state in OUTSIDE_STATES)


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
