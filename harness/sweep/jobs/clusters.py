"""The kinds of cluster by their names in hydra/launcher=, and the states of a comparison's jobs in their queues."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator

from harness.config.from_dict import GroupValues
from harness.records.run_folder import ComparisonFolder
from harness.sweep.jobs.job import JobCluster, submitted_job
from harness.sweep.jobs.kubernetes import Kubernetes
from harness.sweep.jobs.skypilot import Skypilot
from harness.sweep.ray.queue import RayQueue
from harness.sweep.slurm.queue import SlurmQueue
from harness.util.files import read_json_object
from harness.util.redact import keys_holding_secrets
from harness.util.text import UserError

CLUSTERS: dict[str, Callable[[GroupValues], JobCluster]] = {
    cluster.launcher: cluster for cluster in (SlurmQueue, RayQueue, Kubernetes, Skypilot)
}


def job_cluster(launcher: GroupValues) -> JobCluster:
    """Return the cluster that the keys of hydra.launcher describe.

    Raises UserError for a key or a value that it does not take, and for a secret, which a job's files would store.
    """
    keys = {key: value for key, value in launcher.items() if key not in ("_target_", "kind")}
    for key in keys_holding_secrets(keys, "hydra.launcher"):
        raise UserError(
            f"{key} holds a secret, which the job's files would store: set it in the environment of the nodes, or read"
            " it from a file by a line of hydra.launcher.setup"
        )
    return CLUSTERS[launcher["kind"]](keys)


def running_jobs(comparison: ComparisonFolder) -> Iterator[tuple[str, str]]:
    """Yield every combination of a comparison that has a job in the queue, with what its cluster says of it."""
    by_launcher: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for path in comparison.jobs.glob("*.json"):
        launcher = read_json_object(path).get("launcher", {"kind": "slurm"})  # which older files do not name
        if (job := submitted_job(path)) and isinstance(launcher, dict) and str(launcher.get("kind")) in CLUSTERS:
            by_launcher[json.dumps(launcher)][job] = path.stem
    for text, runs in by_launcher.items():
        cluster = job_cluster(json.loads(text))
        for job, state in (cluster.states(set(runs)) or {}).items():
            yield runs[job], f"its {cluster.title} job is {state.lower()}"
