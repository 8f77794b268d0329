"""The behavior of a real Slurm that the launcher relies on, and the tests' cluster, which leaves nothing behind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.slurm_cluster import Cluster, cluster, processes, wait_for

LOST_SECONDS = 60.0  # for a dead node to be given up; on an idle machine it takes 10 to 15

# A parent process to be killed: it starts a cluster with a job, prints that, and waits.
PARENT = """
import sys
from pathlib import Path
from tests.support.slurm_cluster import cluster
with cluster(Path(sys.argv[1])) as slurm:
    slurm.wait_for_job(slurm.submit("srun sleep 600", "--nodes=2"), "RUNNING")
    print(slurm.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def names(cluster: str, node: str = "") -> set[str]:
    return {process.info["name"] for process in processes(cluster, node)}


def test_a_job_of_two_tasks_runs_one_on_each_node(slurm: Cluster) -> None:
    names = ("NODEID", "PROCID", "LOCALID", "GTIDS", "LAUNCH_NODE_IPADDR", "JOB_NODELIST", "RESTART_COUNT")
    write = f"echo {' '.join(f'${{SLURM_{name}:--}}' for name in names)} > $SLURM_JOB_ID.$SLURM_PROCID"
    job = slurm.submit(f"srun bash -c '{write}'", "--nodes=2")
    assert slurm.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED"
    outputs = [(slurm.folder / f"{job}.{task}").read_text().strip() for task in range(2)]
    assert outputs == ["0 0 0 0 127.0.0.1 n[1-2] -", "1 1 0 1 127.0.0.1 n[1-2] -"]


def test_tasks_of_an_array_end_apart(slurm: Cluster) -> None:
    job = slurm.submit("exit $SLURM_ARRAY_TASK_ID", "--array=0-1")
    assert [slurm.wait_for_job(f"{job}_{task}", "COMPLETED", "FAILED") for task in (0, 1)] == ["COMPLETED", "FAILED"]


@pytest.mark.long
def test_a_preempted_job_runs_again(slurm: Cluster) -> None:
    low = slurm.submit(
        "echo restarts ${SLURM_RESTART_COUNT:-none}; [ $SLURM_RESTART_COUNT ] || sleep 600",
        *("--nodes=2", "--exclusive", "--open-mode=append"),
    )
    slurm.wait_for_job(low, "RUNNING")
    high = slurm.submit("true", "--nodes=2", "--exclusive", "--partition=high")
    assert slurm.wait_for_job(high, "COMPLETED", "FAILED") == "COMPLETED"
    assert slurm.wait_for_job(low, "COMPLETED", "FAILED") == "COMPLETED"
    lines = [line for line in (slurm.folder / f"{low}.out").read_text().splitlines() if line.startswith("restarts")]
    assert lines == ["restarts none", "restarts 1"]


@pytest.mark.long
def test_jobs_of_a_lost_node_fail_or_are_requeued(slurm: Cluster) -> None:
    """Jobs of a lost node are NODE_FAIL or wait to run again, and their tasks on the other node are killed."""
    script = "srun bash -c 'touch $SLURM_JOB_ID.$SLURM_PROCID; exec sleep 600'"
    failed, again = (slurm.submit(script, "--nodes=2", option) for option in ("--no-requeue", "--requeue"))
    for job in (failed, again):  # a node lost while srun starts its tasks makes the job FAILED, requeue or not
        wait_for(lambda job=job: len(list(slurm.folder.glob(f"{job}.[01]"))) == 2, 60, f"tasks of {job}")
    slurm.kill_node("n2")
    assert slurm.wait_for_job(failed, "NODE_FAIL", "FAILED", seconds=LOST_SECONDS) == "NODE_FAIL"
    assert slurm.wait_for_job(again, "PENDING", "FAILED", seconds=LOST_SECONDS) == "PENDING"
    wait_for(lambda: "sleep" not in names(slurm.name, "n1"), 30, "the tasks on the other node end")
    assert slurm.nodes()["n2"] == "down*"
    slurm.start_slurmd("n2")
    slurm.wait_for_node("n2", "idle", "mix")
    slurm.run("scancel", again)
    assert slurm.wait_for_job(again, "CANCELLED") == "CANCELLED"


def test_a_cluster_without_accounting_has_no_sacct(slurm: Cluster) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        slurm.run("sacct")
    assert error.value.__notes__ == ["Slurm accounting storage is disabled\n"]


def test_accounting_agrees_with_the_queue(slurm: Cluster, tmp_path: Path) -> None:
    """Accounting agrees with squeue some moments later, and a second cluster can run beside the first."""
    with cluster(tmp_path / "slurm", nodes=1, accounting=True) as accounted:
        job = accounted.submit("exit 3")
        accounted.wait_for_job(job, "FAILED")
        wait_for(lambda: f"{job}|FAILED|3:0" in accounted.run("sacct", "-nPXo", "JobID,State,ExitCode"), 60, "sacct")


def test_a_killed_parent_leaves_no_process(slurm: Cluster, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "slurm")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        name = parent.stdout.readline().strip()
        wait_for(lambda: {"munged", "slurmctld", "slurmd", "sleep"} <= names(name), 30, "all of it runs")
        parent.kill()
    wait_for(lambda: not processes(name), 30, "everything of the killed parent's cluster ends")
