"""What Slurm knows of a partition's nodes, and the GPUs and cores that a job requests of each node."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.config.schema import ClusterConfig
from harness.hardware.machine import CORES_PER_GPU_RANK, CPU_RANKS
from harness.util.errors import UserError

# Options of sbatch that request GPUs too.
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-node", "tres-per-task")


# The GPUs that a job uses of its only node, by `launch`; a job whose ranks are processes has a GPU for each of them.
MOST_GPUS: dict[str, int] = {"virtual": 1, "simulated": 0}


@dataclass(frozen=True)
class NodeShape:
    """The GPUs and cores of a partition's nodes; None where Slurm does not tell."""

    gpus: int | None = None  # of the smallest node with GPUs, else 0
    cores: int | None = None  # of the smallest of these nodes


@dataclass(frozen=True)
class NodeRequest:
    """What a job requests of each node; None is no request."""

    gpus: int | None
    cores: int | None
    devices: int = 0  # the GPUs that its ranks find, whichever option requests them


def request_of(
    cluster: ClusterConfig,
    shape: NodeShape,
    gpus: int | None,
    cores: int | None,
    options: dict[str, Any],
    most_gpus: int | None = None,
) -> NodeRequest:
    """Return what a job requests, from the launcher's keys `gpus` and `cores`, its other options, and the nodes' shape.

    A job that requests no GPU gets none, and one that requests no cores gets a single one, so both are always
    requested. `most_gpus` limits the GPUs that the cluster's keys request, not those of the launcher's. Raises
    UserError if GPUs are wanted and nothing says how many.
    """
    others = max(gpu_count(name, options.get(name)) for name in GPU_OPTIONS)
    if gpus is None and cluster.device != "cpu" and not others:
        gpus = cluster.gpus_per_node or shape.gpus
        if not gpus and (cluster.device == "cuda" or gpus is None):
            reason = "sinfo does not report how many a node has" if gpus is None else "sinfo reports no node with GPUs"
            raise UserError(
                f"cluster.gpus_per_node=null with cluster.device={cluster.device} requests all GPUs of a node, and"
                f" {reason}: choose their number, another cluster.partition, or cluster.device=cpu"
            )
        gpus = gpus if most_gpus is None else min(gpus, most_gpus)
    ranks = gpus or others
    if cores is None and ranks:
        share = shape.cores * ranks // shape.gpus if shape.cores and shape.gpus else 0
        cores = max(CORES_PER_GPU_RANK * ranks, share)
    return NodeRequest(gpus or None, cores or cluster.gpus_per_node or CPU_RANKS, ranks or 0)


def gpu_count(option: str, value: object) -> int:
    """Return how many GPUs an option of sbatch requests: --gpus=h100:4 as well as --gres=gpu:h100:4,nic:1."""
    if value is None:
        return 0
    return last_number(str(value)) if option.startswith("gpus") else gpus_among(str(value))


def gpus_among(resources: str) -> int:
    """Return the GPUs in a list of generic resources, as sinfo and --gres write it: gpu:h100:8(S:0-1),nic:2."""
    entries = re.sub(r"\([^)]*\)", "", resources).split(",")
    return sum(last_number(entry) for entry in entries if "gpu" in re.split("[:=/]", entry))


def last_number(text: str) -> int:
    """Return the number at the end of a text such as gpu:8; 1 if there is none, as Slurm does."""
    number = re.search(r"[:=]?(\d+)$", text)
    return int(number[1]) if number else 1


def node_shape(lines: Iterable[str], partition: str | None) -> NodeShape:
    """Return the shape of a partition's nodes from sinfo's lines of partition, cores and resources.

    Without a partition's name, it is the default one, which sinfo marks by a star.
    """
    nodes = []
    for line in lines:
        name, cores, resources = (*line.split(maxsplit=2), "", "", "")[:3]
        number = re.match(r"\d+", cores)
        if number and (name.rstrip("*") == partition if partition else name.endswith("*")):
            nodes.append((gpus_among(resources), int(number[0])))
    if not nodes:
        return NodeShape()
    gpus = min((count for count, _ in nodes if count), default=0)
    return NodeShape(gpus, min(cores for count, cores in nodes if count == gpus))
