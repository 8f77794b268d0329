"""A run as the job of a cluster, what it requests of a node, and the seam between the harness and a kind of cluster.

The seam is JobCluster: what submits runs, or writes files to submit, and knows of the jobs in the queue. All else
(messages, answers, retries, the program of a node) is the same for every cluster.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from harness.config.from_dict import ConfigValues, GroupValues
from harness.config.schema import ClusterConfig, Device
from harness.hardware.machine import CORES_PER_GPU_RANK, CPU_RANKS
from harness.records.rank_report import RunStatus
from harness.records.run_folder import is_run_id
from harness.sweep.queued_run import QueuedRun
from harness.util.files import atomic_write_json, read_json_object
from harness.util.text import UserError, printable

# The GPUs that a job uses of its only node, by `launch`; a job whose ranks are processes has a GPU for each of them.
MOST_GPUS: dict[str, int] = {"virtual": 1, "simulated": 0}

PORT = 20_000  # the first of those at which a job's nodes meet

NODE_PROGRAM = "harness.sweep.jobs.node"

Shape = tuple[int | None, int | None]  # the GPUs and the cores of a node; None: unknown


@dataclass(frozen=True, kw_only=True)
class JobResources:
    """The keys of hydra.launcher that every cluster has: what a job requests."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    setup: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class JobRun(QueuedRun):
    """A combination to be run by a job."""

    values: ConfigValues
    launcher: GroupValues = field(default_factory=dict)  # the keys of hydra.launcher
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
        atomic_write_json(self.message(), {"values": self.values, "job": self.job, "launcher": self.launcher})


class NodeRequest(NamedTuple):
    """What a job requests of each of its nodes."""

    nodes: int
    gpus: int  # requested by number; 0 also where another option requests them
    cores: int
    ranks: int  # the GPUs that its ranks find, whichever option requests them


class JobEnd(NamedTuple):
    """How a job ended, by its cluster, that left no answer."""

    state: str  # in the cluster's words
    status: RunStatus
    is_outside: bool  # whether another attempt may end otherwise


class JobCluster:
    """A kind of cluster. Where `submits` is False, it writes files of jobs, and the user submits them."""

    launcher: str  # its name in hydra/launcher=
    title: str  # its name in sentences
    submits = False
    max_parallel = 1  # the jobs that run at the same time
    max_queued: float = float("inf")  # the jobs that may be in the queue
    ended_by: str  # the command that ends a job

    def request(self, cluster: ClusterConfig, launch: str) -> NodeRequest:
        """Return what a job requests of each node. Raises UserError if GPUs are wanted and nothing says how many."""
        raise NotImplementedError

    def requested_device(self, cluster: ClusterConfig, launch: str) -> Device:
        """Return the kind of device that a job's ranks run on, or are simulated on. Raises UserError as request()."""
        if cluster.device != "auto":
            return cluster.device
        return "cuda" if self.request(cluster, launch).ranks else "cpu"

    def write_files(self, runs: Sequence[JobRun]) -> list[str]:
        """Write the files of a comparison's jobs, and return the commands that submit them."""
        raise NotImplementedError

    def submit(self, runs: Sequence[JobRun], log: Callable[[str], None]) -> None:
        """Submit a comparison's runs, and note their jobs in them and in their files. Raises UserError."""
        raise NotImplementedError

    def states(self, jobs: set[str]) -> dict[str, str] | None:
        """Return the states of those jobs that are still in the queue; None if the cluster does not answer."""
        raise NotImplementedError

    def end_of(self, job: str) -> JobEnd:
        """Return how a job ended that is no longer in the queue."""
        raise NotImplementedError


def node_request(
    resources: JobResources,
    cluster: ClusterConfig,
    launch: str,
    query_shape: Callable[[], Shape] = lambda: (None, None),
    source: str = "the cluster",
    remedy: str = "",
    other_gpus: int = 0,
) -> NodeRequest:
    """Return what a job requests of each node, by the launcher's keys, those of the cluster, and the nodes' shape.

    A job that requests no GPU gets none, and one that requests no cores gets a single one, so both are always
    requested. `source` is what reports the shape, and `other_gpus` those that another option requests. Raises
    UserError if GPUs are wanted and nothing says how many.
    """
    nodes = resources.nodes or (1 if launch in MOST_GPUS else cluster.nodes)
    if launch == "simulated":
        cluster = replace(cluster, device="cpu", gpus_per_node=None)
    wants_gpus = cluster.device != "cpu"
    node_gpus, node_cores = query_shape() if wants_gpus else (None, None)
    gpus, cores = resources.gpus_per_node, resources.cpus_per_task
    if gpus is None and wants_gpus and not other_gpus:
        gpus = cluster.gpus_per_node or node_gpus
        if not gpus and (cluster.device == "cuda" or gpus is None):
            reason = f"{source} does not report how many a node has"
            if gpus is not None:
                reason = f"{source} reports no node with GPUs"
            raise UserError(
                f"cluster.gpus_per_node=null requests all GPUs of a node, and {reason}: choose their number,"
                f" {remedy}or cluster.device=cpu"
            )
        gpus = min(gpus, MOST_GPUS.get(launch, gpus))
    ranks = gpus or other_gpus
    if cores is None and ranks:
        share = node_cores * ranks // node_gpus if node_cores and node_gpus else 0
        cores = max(CORES_PER_GPU_RANK * ranks, share)
    return NodeRequest(nodes, gpus or 0, cores or cluster.gpus_per_node or CPU_RANKS, ranks)


def printable_lines(lines: Iterable[str], launcher: str) -> str:
    """Return lines of shell as one text. Raises UserError for one with a control character, which may begin another."""
    texts = list(lines)
    for line in texts:
        if not line.isprintable():
            raise UserError(
                f"hydra/launcher={launcher} cannot write a control character into a script: remove the"
                f" \N{REPLACEMENT CHARACTER} from {printable(line)}"
            )
    return "\n".join(texts)


def submitted_job(path: Path) -> str | None:
    """Return the job that was submitted for the combination in this file, None if none was."""
    job = read_json_object(path).get("job")
    return str(job) if job else None
