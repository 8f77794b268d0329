"""The queue of a Ray cluster: a run is a job of Ray, whose driver (harness.sweep.ray.driver) runs its nodes."""

import functools
import importlib.util
import json
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.from_dict import GroupValues, from_dict
from harness.config.schema import ClusterConfig
from harness.sweep.jobs.job import (
    JobCluster,
    JobEnd,
    JobResources,
    JobRun,
    NodeRequest,
    Shape,
    node_request,
    printable_lines,
)
from harness.sweep.ray import NODE_LOST
from harness.util.text import UserError, one_line

LIVE_STATES = {"PENDING": "pending", "RUNNING": "waiting for nodes or running"}  # and their names here

NO_ANSWER = (OSError, RuntimeError)  # what the client raises without one: the library requests has errors of its own


@dataclass(frozen=True, kw_only=True)
class RayResources(JobResources):
    """The keys of hydra.launcher: where the cluster is, and what a job requests of it."""

    address: str | None = None  # of the head, such as http://head:8265; None: what RAY_ADDRESS says, or this machine's
    max_jobs: int = 32  # in Ray's queue at once, each of which has a process on the head
    resources: dict[str, float] = field(default_factory=dict)  # Ray's own resources of a node


class RayQueue(JobCluster):
    """Ray's own queue of jobs: they outlive this command, and `ray job list`, `logs` and `stop` know them."""

    launcher, title, ended_by, submits = "ray", "Ray", "`ray job stop`", True

    def __init__(self, keys: GroupValues) -> None:
        self.resources = from_dict(RayResources, keys, "hydra.launcher")
        self.max_parallel = self.max_queued = self.resources.max_jobs

    @functools.cached_property
    def client(self) -> Any:
        """The client of the cluster's job server. Raises UserError if there is none, or Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise UserError("hydra/launcher=ray needs the library ray: pip install 'training-harness[ray]'")
        submission = importlib.import_module("ray.job_submission")
        try:
            return submission.JobSubmissionClient(self.resources.address)
        except NO_ANSWER as error:
            raise UserError(
                f"hydra.launcher.address={self.resources.address} leads to no Ray cluster ({one_line(error)}): choose"
                " its dashboard, such as http://head:8265, or type ray start --head"
            ) from None

    def node_shape(self) -> Shape:
        """Return the GPUs of the smallest node with GPUs, else 0, and the cores of the smallest such node."""
        state = importlib.import_module("ray.util.state")
        alive = state.list_nodes(address=self.client.get_address(), filters=[("state", "=", "ALIVE")])
        nodes = [(int(node.resources_total.get("GPU", 0)), int(node.resources_total.get("CPU", 0))) for node in alive]
        gpus = min((count for count, _ in nodes if count), default=0)
        return gpus, min((cores for count, cores in nodes if count == gpus), default=None)

    def request(self, cluster: ClusterConfig, launch: str) -> NodeRequest:
        """Return what a job requests of each node. Raises UserError if GPUs are wanted and nothing says how many."""
        return node_request(self.resources, cluster, launch, self.node_shape, "Ray")

    def submit(self, runs: Sequence[JobRun], log: Callable[[str], None]) -> None:
        """Submit a job for each run, whose file has its name before. Raises UserError with Ray's reason."""
        for run in runs:
            run.job = f"harness-{secrets.token_hex(6)}"
            run.write_values()
            entrypoint, metadata = self.entrypoint(run), {"comparison": run.comparison.path.name, "run": run.name}
            try:
                self.client.submit_job(entrypoint=entrypoint, submission_id=run.job, metadata=metadata)
            except NO_ANSWER as error:
                raise UserError(f"hydra/launcher=ray: {one_line(error)}") from None
            log(f"Ray job {run.job}: {run.name}")

    def entrypoint(self, run: JobRun) -> str:
        """Return the lines of shell that are a run's job. Raises UserError for one that would be read otherwise."""
        request = self.request(run.config.cluster, run.config.launch)
        memory = {"memory": self.resources.mem_gb * 1e9} if self.resources.mem_gb else {}
        bundle = {"CPU": request.cores, "GPU": request.gpus, **memory, **self.resources.resources}
        log = run.message().resolve().with_name(f"{run.job}.log")
        words = (run.message().resolve(), log, request.nodes, json.dumps(bundle))
        driver = shlex.join([sys.executable, "-m", "harness.sweep.ray.driver", *map(str, words)])
        return printable_lines([f"cd {shlex.quote(str(Path.cwd()))}", *self.resources.setup, f"exec {driver}"], "ray")

    def states(self, jobs: set[str]) -> dict[str, str] | None:
        """Return the states of those jobs that are still in the queue; None if the head does not answer."""
        if not jobs:
            return {}
        with suppress(*NO_ANSWER):
            known = {job.submission_id: job.status.value for job in self.client.list_jobs()}
            return {job: LIVE_STATES[known[job]] for job in jobs if known.get(job) in LIVE_STATES}
        return None

    def end_of(self, job: str) -> JobEnd:
        """Return how a job ended: stopped, with the status of its driver, or with its head.

        A head that does not know it is another one, and one whose driver has no status lost it.
        """
        try:
            info = self.client.get_job_info(job)
        except NO_ANSWER:
            return JobEnd("lost with its head", "error", True)
        if info.status.value == "STOPPED":
            return JobEnd("STOPPED", "interrupted", False)
        if info.driver_exit_code == NODE_LOST:
            return JobEnd("FAILED with a lost node", "error", True)
        message = one_line(info.message or "").partition(", last available logs")[0]
        return JobEnd(f"{info.status.value} ({message})", "error", info.driver_exit_code is None)
