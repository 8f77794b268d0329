"""Sweeps as jobs of a real Slurm over one and two nodes, and their outcomes when parts of it die."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
import psutil
import pytest
from torch.distributed import DistError, TCPStore

from harness.sweep.slurm.node import FIRST_PORT
from tests.support.commands import ROOT, SMALL, only_row, read_rows, run_harness
from tests.support.slurm_cluster import READY_SECONDS, Cluster, cluster, processes, wait_for, wait_for_step

SLURM = ("hydra/launcher=slurm", "tracking=none", "cluster.device=cpu")

LONGER = ("strategy=ddp", "train.seq_len=32", "train.steps=150", "train.warmup_steps=1", "proof.reference=false")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def start_command(slurm: Cluster, results: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness", *arguments, f"results_dir={json.dumps(str(results))}", *SLURM]
    return subprocess.Popen(
        command, cwd=cwd, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def harness(slurm: Cluster, results: Path, *arguments: str, status: int = 0) -> str:
    """Run a command inside this process and return what it wrote on standard error."""
    with mock.patch.dict(os.environ, slurm.environment, clear=True):
        done = run_harness(results, *arguments, *SLURM)
    assert done.returncode == status, done.stderr
    return done.stderr


def disturbed_row(
    slurm: Cluster, results: Path, disturb: Callable[[Cluster, Path], object], *arguments: str, status: int = 0
) -> pd.Series:
    """Return the row of a run that is disturbed while it trains, and whose command ends with this status."""
    command = start_command(slurm, results, "name=disturbed", *LONGER, *arguments)
    disturb(slurm, wait_for_step(results, "disturbed"))
    output = command.communicate(timeout=240)[1]
    assert command.returncode == status, output
    return only_row(results, "disturbed")


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


def test_a_command_is_refused_as_the_tasks_of_a_step_and_not_in_a_job_of_several(slurm: Cluster) -> None:
    """The command has a mistake, which it only comes to where it is not refused before."""
    command = (sys.executable, "-m", "harness", "strategy=nope")
    for before, words in (
        (("srun", "-n2"), "leave out srun, and add hydra/launcher=slurm"),
        (("salloc", "-n2"), "strategy=nope is not known"),
        (("salloc", "-n2", "srun", "-n1"), "strategy=nope is not known"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as failure:
            slurm.run("env", f"PYTHONPATH={ROOT}", *before, *command)
        assert words in failure.value.stderr
    script = slurm.folder / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -n 2 --output={slurm.folder}/job.log\ncd {ROOT}\n{' '.join(command)}\n")
    with pytest.raises(subprocess.CalledProcessError):
        slurm.run("sbatch", "--wait", str(script))
    assert "strategy=nope is not known" in (slurm.folder / "job.log").read_text()


def test_slurm_reads_folders_and_values_as_they_are(slurm: Cluster, tmp_path: Path) -> None:
    """The checkout and the results lie in folders with blanks, quotes and what Slurm replaces in names of files."""
    checkout, results = tmp_path / "my %j 'checkout' #1", tmp_path / 'my %j "results" %%A'
    for part in ("harness", "conf", "sweeps"):
        shutil.copytree(ROOT / part, checkout / part)
    comment = '50% of a job\'s, "%j" # \\n'
    options = "+hydra.launcher.additional_parameters.comment='{}'".format(comment.replace("'", r"\'"))
    run = ("name=odd", "strategy=ddp", "proof.reference=false", options, *SMALL)
    command = start_command(slurm, results, *run, "hydra.launcher.setup=[pwd]", cwd=checkout)
    output = command.communicate(timeout=240)[1]
    assert command.returncode == 0, output
    assert only_row(results, "odd").status == "ok"
    (log,) = results.glob("odd/.jobs/*.log")
    assert log.read_text().startswith(f"{checkout}\n")
    assert f"Comment={comment} " in slurm.run("scontrol", "show", "job", "--oneliner", log.stem)
    assert {path.name for path in tmp_path.iterdir()} == {checkout.name, results.name}


def plant(port: int, ended: threading.Event) -> None:
    """Give the nodes of a job work through a store of torch as soon as the job listens, as any process can."""
    while not ended.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
    with suppress(DistError):
        TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5)).set("run 1", "planted")


def test_a_stranger_does_not_end_a_run(slurm: Cluster, tmp_path: Path) -> None:
    """Its message reached a node, which ended with it, while the job of two nodes waited for that."""
    number = 1 + max((int(job.partition("_")[0]) for job in slurm.jobs()), default=0)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(plant, FIRST_PORT + number, ended)
        try:
            harness(
                slurm,
                tmp_path,
                *(
                    "name=stranger",
                    "strategy=ddp",
                    "cluster.nodes=2",
                    "proof.reference=false",
                    "timeout_seconds=60",
                    *SMALL,
                ),
            )
        finally:
            ended.set()
    assert only_row(tmp_path, "stranger").status == "ok" and f"{number}_0" in slurm.jobs()
    token = tmp_path / "stranger" / ".jobs" / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != token]
    assert not [path for path in files if token.read_bytes() in path.read_bytes()]


def kill_rank(slurm: Cluster, run_dir: Path) -> None:
    """Kill the process that writes the log of rank 3 and runs its code.

    It is the youngest one, because forkservers have older children.
    """
    log = str(run_dir / "logs" / "rank_3.log")
    writers = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(str(Path(f"/proc/{process.pid}/fd/{fd}").readlink()) == log for fd in (1, 2)):
                writers.append(process)
    max(writers, key=lambda process: process.create_time()).kill()


@pytest.mark.long
def test_a_killed_rank_of_another_node_is_named(slurm: Cluster, tmp_path: Path) -> None:
    row = disturbed_row(slurm, tmp_path, kill_rank, "cluster.nodes=2", "retries=0", status=1)
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


def running_job(slurm: Cluster) -> str:
    (job,) = (job for job, state in slurm.jobs().items() if state == "RUNNING")
    return job


@pytest.mark.long
def test_a_cancelled_job_is_an_interrupted_row_and_is_run_again(slurm: Cluster, tmp_path: Path) -> None:
    row = disturbed_row(slurm, tmp_path, lambda *_: slurm.run("scancel", running_job(slurm)), status=1)
    assert row.status == "interrupted", row.reason
    harness(slurm, tmp_path, "name=disturbed", *LONGER)
    assert only_row(tmp_path, "disturbed").status == "ok"


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


def preempt(slurm: Cluster, _: Path) -> None:
    job = running_job(slurm)
    slurm.run("sbatch", "--wrap=sleep 3", "--partition=high", "--nodes=2", "--exclusive")
    wait_for(
        lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", "-o", job), READY_SECONDS, f"{job} is requeued"
    )


def lose(node: str, slurm: Cluster, _: Path) -> None:
    slurm.kill_node(node)
    slurm.wait_for_node(node, "down*", "down")
    slurm.start_slurmd(node)


def drain(slurm: Cluster, _: Path) -> None:
    """Drain one node, and kill the daemon of the other for a second; its job's steps live on under slurmstepd."""
    slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    slurmd = slurm.daemons.pop("n2")
    slurmd.kill()
    slurmd.wait()
    time.sleep(1)
    slurm.start_slurmd("n2")


NO_REQUEUE = "+hydra.launcher.additional_parameters={requeue: false, no_requeue: true}"

DISTURBANCES: dict[str, tuple[Callable[[Cluster, Path], None], str, str]] = {  # with an argument, and words of a reason
    "a preempted run": (preempt, "cluster.partition=low", ""),
    "a lost node that led": (partial(lose, "n1"), "", ""),
    "a lost node that followed": (partial(lose, "n2"), "", ""),
    "a drained node and a killed slurmd": (drain, "", ""),
    "a node lost for good, whose site requeues no jobs": (
        lambda slurm, _: slurm.kill_node("n1"),
        NO_REQUEUE,
        "NODE_FAIL",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("disturb", "argument", "words"), DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_run_survives_what_its_job_survives(
    disturb: Callable[[Cluster, Path], None], argument: str, words: str, slurm: Cluster, tmp_path: Path
) -> None:
    """Slurm requeues a job whose nodes are taken, and the job waits for them and runs again."""
    arguments = ("cluster.nodes=2", "retries=0", *filter(None, [argument]))
    row = disturbed_row(slurm, tmp_path, disturb, *arguments, status=int(bool(words)))
    assert row.status == ("error" if words else "ok") and words in str(row.reason)
    for node, state in slurm.nodes().items():
        if node not in slurm.daemons:
            slurm.start_slurmd(node)
        elif state.startswith("dr"):
            slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def preempt_for_good(slurm: Cluster, _: Path) -> None:
    job = running_job(slurm)
    slurm.run("sbatch", "--wrap=sleep 3", "--partition=high", "--nodes=2", "--exclusive")
    wait_for(lambda: slurm.jobs()[job] == "PREEMPTED", READY_SECONDS, f"{job} is preempted")


@pytest.mark.long
@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        (preempt_for_good, "PREEMPTED|its command was killed|stopped by a signal"),
        (partial(lose, "n1"), "NODE_FAIL"),
        (kill_rank, "rank 3 was killed by SIGKILL"),
    ],
    ids=["preempted", "a lost node", "a killed rank"],
)
def test_a_command_submits_again_what_slurm_does_not_requeue(
    disturb: Callable[[Cluster, Path], None], words: str, slurm: Cluster, tmp_path: Path
) -> None:
    arguments = ("cluster.nodes=2", "cluster.partition=low", "retry_pause_seconds=3", NO_REQUEUE)
    row = disturbed_row(slurm, tmp_path, disturb, *arguments)
    assert (row.status, row.attempts) == ("ok", 2) and re.search(words, row.earlier_ends), row.earlier_ends


def test_jobs_that_need_different_nodes_are_separate_arrays(slurm: Cluster, tmp_path: Path) -> None:
    sweep = ("-m", "name=needs", "strategy=ddp", "cluster.nodes=1,2", "train.seed=0,1", *SMALL)
    harness(slurm, tmp_path, *sweep, "hydra.launcher.submit=false")
    scripts = [path.read_text() for path in sorted((tmp_path / "needs").glob("*.sbatch"))]
    assert sorted("--nodes=2\n" in script for script in scripts) == [False, True]
    assert all("#SBATCH --array=0-1%256" in script for script in scripts)


def test_a_job_that_the_queue_refuses_prints_one_line(slurm: Cluster, tmp_path: Path) -> None:
    output = harness(slurm, tmp_path, "name=nowhere", "cluster.partition=nowhere", *LONGER, status=2)
    assert "invalid partition" in output.splitlines()[-1]


# A parent process to be killed: it starts a cluster with a job, prints its name, and waits.
PARENT = """
import sys
from pathlib import Path
from tests.support.slurm_cluster import cluster
with cluster(Path(sys.argv[1])) as slurm:
    slurm.run("sbatch", "--wrap=srun sleep 600", "--nodes=2")
    print(slurm.name, flush=True)
    sys.stdin.read()
"""


def test_a_killed_parent_leaves_no_process(slurm: Cluster, tmp_path: Path) -> None:
    """A second cluster runs beside the first."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "slurm")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        name = parent.stdout.readline().strip()  # type: ignore[union-attr]
        every = {"munged", "slurmctld", "slurmd", "sleep"}
        wait_for(lambda: every <= {each.info["name"] for each in processes(name)}, 30, "all of it runs")
        parent.kill()
    wait_for(lambda: not processes(name), 30, "everything of the killed parent's cluster ends")
