"""A real Ray on this machine for tests: a head without cores, and a raylet for every further node.

Its processes end with the test's, because Ray starts them so.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.launcher.multinode import free_port

CORES = 2  # of a node

# Ray gives a dead node up after two checks, a job without its driver at once.
VARIABLES = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass
class RayCluster:
    """A running cluster, with the operations that tests need."""

    cluster: Any  # ray.cluster_utils.Cluster
    address: str  # of the head's dashboard
    nodes: list[Any] = field(default_factory=list)

    def add_node(self) -> None:
        """Start another node."""
        self.nodes.append(self.cluster.add_node(num_cpus=CORES, dashboard_agent_listen_port=free_port()))

    def kill_node(self, index: int) -> None:
        """Kill a node's raylet, whose workers then end."""
        self.cluster.remove_node(self.nodes.pop(index), allow_graceful=False)

    def client(self) -> Any:
        """Return the client of the head's job server."""
        from ray.job_submission import JobSubmissionClient

        return JobSubmissionClient(self.address)

    def jobs(self) -> dict[str, str]:
        """Return the state of every job of Ray."""
        return {job.submission_id: job.status.value for job in self.client().list_jobs()}


@contextmanager
def ray_cluster(folder: Path, nodes: int = 2) -> Iterator[RayCluster]:
    """Yield a cluster of so many nodes, whose files lie in this folder."""
    utils = pytest.importorskip("ray.cluster_utils")
    port = free_port()
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "temp_dir": str(folder)}
    (folder / "ray").mkdir()  # where Ray's Cluster writes its address, without making the folder
    with mock.patch.dict(os.environ, VARIABLES | {"RAY_TMPDIR": str(folder)}):
        head["dashboard_agent_listen_port"] = free_port()  # its own is the same for every cluster of a machine
        cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            started = RayCluster(cluster, f"http://127.0.0.1:{port}")
            for _ in range(nodes):
                started.add_node()
            yield started
        finally:
            cluster.shutdown()
