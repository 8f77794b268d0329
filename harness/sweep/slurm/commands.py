"""Slurm's commands and batch scripts: sbatch, squeue and scontrol. Slurm's accounting is not needed."""

import functools
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.command import CommandConfig
from harness.config.schema import ClusterConfig, RunConfig
from harness.sweep.jobs.job import JobResources, NodeRequest, Shape, node_request, printable_lines
from harness.util.text import UserError, one_line

COMMAND_SECONDS = 60.0  # for one of Slurm's commands to answer

MOST_IN_ARRAY = 1000  # Slurm's own limit unless a site sets another: MaxArraySize=1001

SPARE_SECONDS = 300.0  # of a job, beside what a run and its reference may take

# Options of sbatch that request GPUs too.
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-node", "tres-per-task")


@dataclass(frozen=True, kw_only=True)
class SlurmResources(JobResources):
    """The keys of hydra.launcher: what a job requests. They are those of Hydra's submitit launcher, and `submit`."""

    submit: bool = True  # whether jobs are submitted, or batch scripts written to submit by hand
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    timeout_min: int | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    array_parallelism: int = 256
    srun_args: tuple[str, ...] = ()
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # further options, passed on as they are


def sbatch_directives(resources: SlurmResources, config: RunConfig, command: CommandConfig) -> str:
    """Return the #SBATCH lines of one run's job: one task on each node, which starts that node's ranks.

    Raises UserError if the run needs GPUs and nothing says how many.
    """
    cluster = config.cluster
    request = request_of(resources, cluster, config.launch)
    minutes = math.ceil((2 * command.timeout_seconds + SPARE_SECONDS) / 60)
    options: dict[str, Any] = {  # True: an option without a value; None: it is not set
        "job-name": f"harness-{command.name}",
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "partition": resources.partition or cluster.partition,
        "account": resources.account or cluster.account,
        "qos": resources.qos,
        "gpus-per-node": request.gpus,
        "cpus-per-task": request.cores,
        "mem": f"{resources.mem_gb:g}G" if resources.mem_gb else None,
        "time": resources.timeout_min or cluster.time or minutes,
        "constraint": resources.constraint,
        "exclude": resources.exclude,
        "gres": resources.gres,
        "requeue": True,
        "open-mode": "append",
        **other_options(resources),
    }
    return printable_lines((sbatch_option(key, value) for key, value in options.items() if value), "slurm")


def sbatch_option(key: str, value: object) -> str:
    """Return the #SBATCH line of an option. Sbatch knows quotes, in which a backslash stands before " and itself."""
    text = str(value)
    quoted = text if shlex.quote(text) == text else '"{}"'.format(re.sub(r'[\\"]', r"\\\g<0>", text))
    return f"#SBATCH --{key}" + ("" if value is True else f"={quoted}")


def other_options(resources: SlurmResources) -> dict[str, Any]:
    """Return the further options of sbatch, as sbatch spells them."""
    return {key.replace("_", "-"): value for key, value in resources.additional_parameters.items()}


def request_of(resources: SlurmResources, cluster: ClusterConfig, launch: str) -> NodeRequest:
    """Return what a job requests of each node. Raises UserError if GPUs are wanted and nothing says how many."""
    options = {"gres": resources.gres} | other_options(resources)
    others = max(gpu_count(name, str(options.get(name) or "")) for name in GPU_OPTIONS)
    query = functools.partial(query_node_shape, resources.partition or cluster.partition)
    return node_request(resources, cluster, launch, query, "sinfo", "another cluster.partition, ", others)


def gpu_count(option: str, value: str) -> int:
    """Return how many GPUs an option of sbatch requests: --gpus=h100:4 as well as --gres=gpu:h100:4,nic:1."""
    return last_number(value) if value and option.startswith("gpus") else gpus_among(value)


def gpus_among(resources: str) -> int:
    """Return the GPUs in a list of generic resources, as sinfo and --gres write it: gpu:h100:8(S:0-1),nic:2."""
    entries = re.sub(r"\([^)]*\)", "", resources).split(",")
    return sum(last_number(entry) for entry in entries if "gpu" in re.split("[:=/]", entry))


def last_number(text: str) -> int:
    """Return the number at the end of a text such as gpu:8; 1 if there is none, as Slurm does."""
    number = re.search(r"[:=]?(\d+)$", text)
    return int(number[1]) if number else 1


def batch_script(directives: str, resources: SlurmResources, files: Sequence[Path], logs: Path) -> str:
    """Return a batch script that runs every file of values as a job of one array.

    Raises UserError for a path or a line of shell that Slurm would read otherwise.
    """
    if "\\" in str(logs):
        raise UserError(f"results_dir: Slurm writes no log to {logs}: choose a folder without a backslash in its path")
    program = shlex.join([*resources.srun_args, sys.executable, "-m", "harness.sweep.slurm.node"])
    # Since Slurm 22.05 srun does not take the cores from the job, and would start the task on a single one.
    srun = f"srun ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {program}"
    lines = [
        f"#SBATCH --array=0-{len(files) - 1}%{resources.array_parallelism}",
        sbatch_option("output", str(logs).replace("%", "%%") + "/%A_%a.log"),  # elsewhere %j is the job, and so on
        sbatch_option("chdir", Path.cwd()),
        "files=(",
        *(f"    {shlex.quote(str(path))}" for path in files),
        ")",
        *resources.setup,
        f'{srun} "${{files[$SLURM_ARRAY_TASK_ID]}}"',
    ]
    return f"#!/bin/bash\n{directives}\n{printable_lines(lines, 'slurm')}\n"


@functools.cache
def query_node_shape(partition: str | None) -> Shape:
    """Return the GPUs of the smallest node with GPUs, else 0, and the cores of the smallest such node; None if unknown.

    Nodes are those of a partition, or of the default partition, as far as sinfo reports them.
    A line has a node's partition, cores and resources; a star marks the default partition.
    """
    lines = slurm_output("sinfo", "--noheader", "--format=%P %c %G") or ""
    nodes = [
        (gpus_among(resources), int(cores))
        for name, star, cores, resources in re.findall(r"^(\S+?)(\*?) +(\d+)\S* *(.*)$", lines, re.MULTILINE)
        if (name == partition if partition else star)
    ]
    if not nodes:
        return None, None
    gpus = min((count for count, _ in nodes if count), default=0)
    return gpus, min(cores for count, cores in nodes if count == gpus)


def submit(script: str, folder: Path) -> str:
    """Submit a batch script and return the number of its job array. Raises UserError with sbatch's own message."""
    result = run_slurm_command("sbatch", "--parsable", standard_input=script, cwd=folder)
    if result is None or result.returncode:
        reason = "sbatch is not installed, or does not answer" if result is None else one_line(result.stderr)
        raise UserError(f"hydra/launcher=slurm: {reason}")
    return result.stdout.strip().partition(";")[0]


def squeue_states(jobs: set[str]) -> dict[str, str] | None:
    """Return the states of those jobs (such as 12_3) that are still in the queue; None if Slurm does not answer."""
    if not jobs:
        return {}
    queue = slurm_output("squeue", "--me", "--noheader", "--array", "--format=%i %T")
    if queue is None:
        return None
    states = dict(line.split(maxsplit=1) for line in queue.splitlines() if " " in line.strip())
    return {job: state for job, state in states.items() if job in jobs}


def final_state(job: str) -> str:
    """Return the state in which a job ended, such as NODE_FAIL; '' if Slurm no longer knows the job."""
    state = re.search(r"(?:^|\s)JobState=(\S*)", slurm_output("scontrol", "show", "job", "--oneliner", job) or "")
    return state[1] if state else ""


def slurm_output(*words: str) -> str | None:
    """Return what one of Slurm's commands prints; None if it fails, is not installed or does not answer in time."""
    result = run_slurm_command(*words)
    return None if result is None or result.returncode else result.stdout


def run_slurm_command(
    *words: str, standard_input: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands; return None if it is not installed or does not answer in time."""
    try:
        return subprocess.run(
            words, input=standard_input, cwd=cwd, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
