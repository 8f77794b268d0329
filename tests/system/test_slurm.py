"""Sweeps as jobs of a real Slurm over one and two nodes, and their outcomes when parts of it die."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.support import slurm_cluster
from tests.support.commands import ROOT, read_rows, run_harness
from tests.support.slurm_cluster import READY_SECONDS, Cluster, wait_for, wait_for_step

SLURM = ("hydra/launcher=slurm", "tracking=none", "cluster.device=cpu")

SMALL = ("train.seq_len=32", "train.steps=1", "train.warmup_steps=1")

LONGER = ("strategy=ddp", "train.seq_len=32", "train.steps=150", "train.warmup_steps=1", "proof.reference=false")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def start_command(slurm: Cluster, results: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness", *arguments, f"results_dir={results}", *SLURM]
    return subprocess.Popen(
        command, cwd=ROOT, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_end(command: subprocess.Popen[str], status: int = 0) -> str:
    """Return what the command wrote on standard error."""
    output = command.communicate(timeout=240)[1]
    assert command.returncode == status, output
    return output


def harness(slurm: Cluster, results: Path, *arguments: str, status: int = 0) -> str:
    """Run a command inside this process and return what it wrote on standard error."""
    with pytest.MonkeyPatch.context() as patched:
        for name in os.environ.keys() - slurm.environment.keys():
            patched.delenv(name)
        for name, value in slurm.environment.items():
            patched.setenv(name, value)
        done = run_harness(results, *arguments, *SLURM)
    assert done.returncode == status, done.stderr
    return done.stderr


def only_row(results: Path, name: str) -> pd.Series:
    (index,) = read_rows(results, name).index
    return read_rows(results, name).loc[index]


def rank_process(run_dir: Path, rank: int) -> psutil.Process:
    """Return the process that writes that rank's log and runs its code.

    It is the youngest one, because forkservers have older children.
    """
    log = str(run_dir / "logs" / f"rank_{rank}.log")
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(str(Path(f"/proc/{process.pid}/fd/{fd}").readlink()) == log for fd in (1, 2)):
                processes.append(process)
    assert processes, log
    return max(processes, key=lambda process: process.create_time())


@pytest.mark.parametrize(
    "strategies",
    [["tp_pp"], pytest.param(["ddp", "fsdp_full_shard", "pp_1f1b", "zero3"], marks=pytest.mark.long)],
    ids=",".join,
)
def test_runs_over_two_nodes_train_the_same(slurm: Cluster, tmp_path: Path, strategies: list[str]) -> None:
    """Each run is proven against the single process, and the same command again submits nothing."""
    sweep = ("-m", "name=two", f"strategy={','.join(strategies)}", "cluster.nodes=2", *SMALL)
    harness(slurm, tmp_path, *sweep)
    rows = read_rows(tmp_path, "two")
    assert sorted(rows.strategy) == strategies
    assert set(rows.status) == {"ok"} and set(rows.world_size) == {4}
    assert rows.loss_deviation.max() < 1e-5 and rows.grad_deviation.max() < 1e-4
    nodes = [{path.name for path in (tmp_path / "two" / run / "logs").glob("rank_*")} for run in rows.run_id]
    assert all(logs == {f"rank_{rank}.log" for rank in range(4)} for logs in nodes)
    jobs = slurm.jobs()
    assert "is recorded" in harness(slurm, tmp_path, *sweep)
    assert slurm.jobs().keys() == jobs.keys()


@pytest.mark.long
def test_a_killed_rank_of_another_node_is_named(slurm: Cluster, tmp_path: Path) -> None:
    command = start_command(slurm, tmp_path, "name=killed", "cluster.nodes=2", *LONGER)
    run_dir = wait_for_step(tmp_path, "killed")
    rank_process(run_dir, 3).kill()
    wait_for_end(command, status=1)
    row = only_row(tmp_path, "killed")
    assert row.status == "error" and row.reason.startswith("rank 3 was killed by SIGKILL"), row.reason
    assert row.failed_in_phase == "timed" and row.last_seen_rss_bytes > 2**26


@pytest.mark.long
def test_a_command_reuses_the_jobs_of_a_killed_command(slurm: Cluster, tmp_path: Path) -> None:
    sweep = ("-m", "name=again", "train.seed=0,1", *LONGER)
    first = start_command(slurm, tmp_path, *sweep)
    wait_for_step(tmp_path, "again")
    first.kill()
    first.communicate()
    jobs = slurm.jobs()
    harness(slurm, tmp_path, *sweep)
    assert slurm.jobs().keys() == jobs.keys()
    assert list(read_rows(tmp_path, "again").status) == ["ok", "ok"]


@pytest.mark.long
def test_a_cancelled_job_is_an_interrupted_row_and_is_run_again(slurm: Cluster, tmp_path: Path) -> None:
    command = start_command(slurm, tmp_path, "name=cancelled", *LONGER)
    wait_for_step(tmp_path, "cancelled")
    (job,) = (job for job, state in slurm.jobs().items() if state == "RUNNING")
    slurm.run("scancel", job)
    wait_for_end(command, status=1)
    row = only_row(tmp_path, "cancelled")
    assert row.status == "interrupted", row.reason
    harness(slurm, tmp_path, "name=cancelled", *LONGER)
    assert only_row(tmp_path, "cancelled").status == "ok"


@pytest.mark.long
def test_a_script_is_written_to_be_submitted_by_hand(slurm: Cluster, tmp_path: Path) -> None:
    sweep = ("-m", "name=by_hand", "strategy=ddp", "train.seed=0,1", "proof.reference=false", *SMALL)
    harness(
        slurm,
        tmp_path,
        *sweep,
        "hydra.launcher.submit=false",
        "hydra.launcher.setup=[echo set up]",
        "cluster.time=0:10:00",
    )
    script = tmp_path / "by_hand" / "sweep.sbatch"
    assert "#SBATCH --time=0:10:00\n" in script.read_text()
    before = slurm.jobs()
    slurm.run("sbatch", str(script))
    wait_for(lambda: len(list(script.parent.glob(".jobs/*.answer.json"))) == 2, 120, "both jobs answered")
    assert len(slurm.jobs()) == len(before) + 2
    assert "is recorded" in harness(slurm, tmp_path, *sweep)
    assert list(read_rows(tmp_path, "by_hand").status) == ["ok", "ok"]


@pytest.mark.long
def test_a_preempted_run_is_requeued_and_completed(slurm: Cluster, tmp_path: Path) -> None:
    command = start_command(slurm, tmp_path, "name=preempted", "cluster.partition=low", "cluster.nodes=2", *LONGER)
    run_dir = wait_for_step(tmp_path, "preempted")
    slurm.submit("sleep 3", "--partition=high", "--nodes=2", "--exclusive")
    wait_for_end(command)
    assert only_row(tmp_path, "preempted").status == "ok"
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", "-o", max(slurm.jobs(), key=job_number)) or run_dir


def job_number(job: str) -> int:
    return int(job.partition("_")[0])


@pytest.mark.long
@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_a_run_survives_a_lost_node(slurm: Cluster, tmp_path: Path, lost: str) -> None:
    """Slurm requeues the job whether the lost node led or followed; the job waits for the node and runs again."""
    command = start_command(slurm, tmp_path, "name=lost", "cluster.nodes=2", *LONGER)
    wait_for_step(tmp_path, "lost")
    slurm.kill_node(lost)
    slurm.wait_for_node(lost, "down*", "down")
    slurm.start_slurmd(lost)
    wait_for_end(command)
    assert only_row(tmp_path, "lost").status == "ok"


@pytest.mark.long
def test_a_slurmd_that_is_killed_and_a_node_that_is_drained_do_not_end_a_run(slurm: Cluster, tmp_path: Path) -> None:
    command = start_command(slurm, tmp_path, "name=slurmd", "cluster.nodes=2", *LONGER)
    wait_for_step(tmp_path, "slurmd")
    slurm.drain("n1")
    slurm.kill_slurmd("n2")
    time.sleep(1)
    slurm.start_slurmd("n2")
    wait_for_end(command)
    slurm.resume("n1")
    assert only_row(tmp_path, "slurmd").status == "ok"


def test_jobs_that_need_different_nodes_are_separate_arrays(slurm: Cluster, tmp_path: Path) -> None:
    sweep = ("-m", "name=needs", "strategy=ddp", "cluster.nodes=1,2", "train.seed=0,1", *SMALL)
    harness(slurm, tmp_path, *sweep, "hydra.launcher.submit=false")
    scripts = [path.read_text() for path in sorted((tmp_path / "needs").glob("*.sbatch"))]
    assert sorted("--nodes=2\n" in script for script in scripts) == [False, True]
    assert all("#SBATCH --array=0-1%256" in script for script in scripts)


@pytest.mark.long
def test_a_node_lost_for_good_is_an_error_row(slurm: Cluster, tmp_path: Path) -> None:
    """The site does not requeue jobs."""
    arguments = ("name=gone", "+hydra.launcher.additional_parameters={requeue: false, no_requeue: true}", *LONGER)
    command = start_command(slurm, tmp_path, *arguments, "cluster.nodes=2")
    wait_for_step(tmp_path, "gone")
    slurm.kill_node("n1")
    wait_for_end(command, status=1)
    slurm.start_slurmd("n1")
    row = only_row(tmp_path, "gone")
    assert row.status == "error" and "NODE_FAIL" in row.reason


@pytest.mark.long
def test_a_run_on_a_cluster_with_accounting(tmp_path: Path) -> None:
    with slurm_cluster.cluster(tmp_path / "slurm", accounting=True) as cluster:
        harness(cluster, tmp_path, "name=accounted", "strategy=ddp", "cluster.nodes=2", *SMALL)
        assert only_row(tmp_path, "accounted").status == "ok"
        # slurmctld tells slurmdbd of a job's end when it gets to it.
        states = ("sacct", "-n", "-X", "-o", "State")
        wait_for(lambda: "COMPLETED" in cluster.run(*states), READY_SECONDS, "the job's end in the accounting")


def test_a_job_that_the_queue_refuses_prints_one_line(slurm: Cluster, tmp_path: Path) -> None:
    output = harness(slurm, tmp_path, "name=nowhere", "cluster.partition=nowhere", *LONGER, status=2)
    assert "invalid partition" in output.splitlines()[-1]
