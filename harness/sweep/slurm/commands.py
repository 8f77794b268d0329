"""Slurm itself: the batch script of a group of runs, and what its commands say of jobs. No accounting is needed."""

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.hardware.machine import CPU_RANKS
from harness.util.errors import UserError
from harness.util.text import one_line

COMMAND_SECONDS = 60.0  # for a command of Slurm's to answer

MOST_IN_ARRAY = 1000  # Slurm's own limit unless a site sets another: MaxArraySize=1001

SPARE_SECONDS = 300.0  # of a job, beside what a run and its reference may take


@dataclass(frozen=True)
class SlurmResources:
    """What a job asks for; the keys of Hydra's submitit launcher."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    timeout_min: int | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    array_parallelism: int = 256
    setup: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    additional_parameters: dict[str, Any] = field(default_factory=dict)


def sbatch_directives(asked: SlurmResources, config: RunConfig) -> str:
    """The #SBATCH lines of what one run needs: a task a node, which starts that node's ranks."""
    cluster = config.cluster
    gpus = asked.gpus_per_node or (cluster.gpus_per_node if cluster.device != "cpu" else None)
    cpus = asked.cpus_per_task
    if cpus is None and gpus is None:
        cpus = cluster.gpus_per_node or CPU_RANKS
    minutes = math.ceil((2 * config.timeout_seconds + SPARE_SECONDS) / 60)
    given: dict[str, Any] = {
        "job-name": f"harness-{config.name}",
        "nodes": asked.nodes or cluster.nodes,
        "ntasks-per-node": 1,
        "partition": asked.partition or cluster.partition,
        "account": asked.account or cluster.account,
        "qos": asked.qos,
        "gpus-per-node": gpus,
        "cpus-per-task": cpus,
        "mem": f"{asked.mem_gb:g}G" if asked.mem_gb else None,
        "time": asked.timeout_min or cluster.time or minutes,
        "constraint": asked.constraint,
        "exclude": asked.exclude,
        "gres": asked.gres,
        "requeue": True,
        "open-mode": "append",
    }
    given |= {key.replace("_", "-"): value for key, value in asked.additional_parameters.items()}
    lines = [f"#SBATCH --{key}" + ("" if value is True else f"={value}") for key, value in given.items() if value]
    return "\n".join(lines)


def script(header: str, asked: SlurmResources, works: Sequence[Path], logs: Path) -> str:
    """A batch script that runs every work file as a job of one array."""
    listed = "\n".join(f"    {shlex.quote(str(work))}" for work in works)
    srun = shlex.join(["srun", *asked.srun_args, sys.executable, "-m", "harness.sweep.slurm.node"])
    return "\n".join(
        [
            "#!/bin/bash",
            header,
            f"#SBATCH --array=0-{len(works) - 1}%{asked.array_parallelism}",
            f"#SBATCH --output={logs}/%A_%a.log",
            f"#SBATCH --chdir={Path.cwd()}",
            "works=(",
            listed,
            ")",
            *asked.setup,
            f'{srun} "${{works[$SLURM_ARRAY_TASK_ID]}}"',
            "",
        ]
    )


def submit(text: str, folder: Path) -> str:
    """The number of the array that the script became; raises UserError with Slurm's own word if it refuses."""
    done = run_slurm_command("sbatch", "--parsable", given=text, cwd=folder)
    if done is None or done.returncode:
        why = "sbatch is not there, or does not answer" if done is None else one_line(done.stderr)
        raise UserError(f"hydra/launcher=submitit_slurm: {why}")
    return done.stdout.strip().partition(";")[0]


def squeue_states(jobs: set[str]) -> dict[str, str] | None:
    """The state of those of the jobs (12_3) that Slurm has not done with; None if it does not answer."""
    if not jobs:
        return {}
    done = run_slurm_command("squeue", "--me", "--noheader", "--array", "--format=%i %T")
    if done is None or done.returncode:
        return None
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line.strip())
    return {job: state for job, state in found.items() if job in jobs}


def final_state(job: str) -> str:
    """How Slurm says that a job ended, such as NODE_FAIL; '' if it has forgotten."""
    done = run_slurm_command("scontrol", "show", "job", "--oneliner", job)
    fields = done.stdout.split() if done is not None and not done.returncode else []
    return next((entry.partition("=")[2] for entry in fields if entry.startswith("JobState=")), "")


def run_slurm_command(
    *words: str, given: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            words, input=given, cwd=cwd, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
