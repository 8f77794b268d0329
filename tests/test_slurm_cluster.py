"""How a real Slurm behaves where the launcher relies on it, and that the tests' cluster leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from slurm_cluster import Cluster, cluster, wait_for

LOST_SECONDS = 45.0  # for a dead slurmd to be noticed: 5 to 15 s on an idle machine


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := slurm_cluster.install():
        pytest.skip(why)
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def test_two_tasks_of_a_job(slurm: Cluster) -> None:
    write = 'echo "$SLURM_NODEID $SLURM_LAUNCH_NODE_IPADDR $SLURM_JOB_NODELIST" > $SLURM_JOB_ID.$SLURM_PROCID'
    job = slurm.submit(f"srun bash -c '{write}'", "--nodes=2")
    assert slurm.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED"
    said = [(slurm.folder / f"{job}.{task}").read_text().split() for task in range(2)]
    assert said == [["0", "127.0.0.1", "n[1-2]"], ["1", "127.0.0.1", "n[1-2]"]]


def test_preempted_job_runs_again(slurm: Cluster) -> None:
    script = "echo started ${SLURM_RESTART_COUNT:-0}; [ -n \"$SLURM_RESTART_COUNT\" ] || sleep 600"
    low = slurm.submit(script, "--nodes=2", "--exclusive", "--open-mode=append")
    slurm.wait_for_job(low, "RUNNING")
    high = slurm.submit("true", "--nodes=2", "--exclusive", "--partition=high")
    assert slurm.wait_for_job(high, "COMPLETED", "FAILED") == "COMPLETED"
    assert slurm.wait_for_job(low, "COMPLETED", "FAILED") == "COMPLETED"
    assert (slurm.folder / f"{low}.out").read_text().count("started") == 2


@pytest.mark.parametrize(("option", "state"), [("--no-requeue", "NODE_FAIL"), ("--requeue", "PENDING")])
def test_lost_node(slurm: Cluster, option: str, state: str) -> None:
    job = slurm.submit("srun sleep 600", "--nodes=2", option)
    slurm.wait_for_job(job, "RUNNING")
    slurm.kill_node("n2")
    assert slurm.wait_for_job(job, state, "COMPLETED", "FAILED", seconds=LOST_SECONDS) == state
    slurm.run("scancel", job)
    slurm.start_slurmd("n2")
    slurm.wait_for_node("n2", "idle")


def test_sacct(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        slurm.run("sacct")
    with cluster(tmp_path / "accounted", accounting=True, nodes=1) as accounted:
        job = accounted.submit("exit 3")
        accounted.wait_for_job(job, "FAILED")
        wait_for(lambda: f"{job}|FAILED|3:0" in accounted.run("sacct", "-nPXo", "JobID,State,ExitCode"), 30, "sacct")
