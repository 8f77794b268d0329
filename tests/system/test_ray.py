"""Sweeps as jobs of a real Ray over several nodes, and their outcomes when parts of it die."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.sweep.ray import queue
from harness.sweep.ray.queue import LIVE_STATES, RayQueue
from harness.util.text import UserError
from tests.support.commands import ROOT, SMALL, only_row, read_rows, run_harness
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.slurm_cluster import wait_for, wait_for_step

RAY = ("hydra/launcher=ray", "tracking=none", "cluster.device=cpu")

LONGER = ("strategy=ddp", "train.seq_len=32", "train.steps=120", "train.warmup_steps=1", "proof.reference=false")

SECRET = "hf_aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f"


COMMANDS: list[subprocess.Popen[str]] = []  # of the test that runs


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_cluster(Path(folder)) as started:
        yield started


@pytest.fixture
def ray(cluster: RayCluster) -> Iterator[RayCluster]:
    """Yield the cluster with two nodes, whatever an earlier test left of them, and leave no job behind."""
    while len(cluster.nodes) < 2:
        cluster.add_node()
    yield cluster
    for command in COMMANDS:
        command.kill()
    COMMANDS.clear()
    for job, state in cluster.jobs().items():
        if state in LIVE_STATES:
            cluster.client().stop_job(job)


def start_command(ray: RayCluster, results: Path, *arguments: str) -> subprocess.Popen[str]:
    settings = (f"results_dir={json.dumps(str(results))}", f"hydra.launcher.address={ray.address}", *RAY)
    command = [sys.executable, "-m", "harness", *arguments, *settings]
    environment = os.environ | {"HF_TOKEN": SECRET}
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    COMMANDS.append(started)
    return started


def harness(ray: RayCluster, results: Path, *arguments: str, status: int = 0) -> str:
    """Run a command to its end and return what it wrote on standard error."""
    command = start_command(ray, results, *arguments)
    error = command.communicate(timeout=400)[1]
    assert command.returncode == status, error
    return error


def rank_process(run_dir: Path, rank: int) -> psutil.Process:
    """Return the process that writes the log of a rank: the youngest one, because forkservers have older children."""
    log = str(run_dir / "logs" / f"rank_{rank}.log")
    writers = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(str(Path(f"/proc/{process.pid}/fd/{fd}").readlink()) == log for fd in (1, 2)):
                writers.append(process)
    return max(writers, key=lambda process: process.create_time())


def test_a_sweep_over_two_nodes_trains_the_same_once(ray: RayCluster, tmp_path: Path) -> None:
    """The run is proven, its job is known to Ray without a secret, and the same command submits nothing."""
    sweep = ("-m", "name=two", "strategy=tp_pp", "cluster.nodes=2", *SMALL)
    output = harness(ray, tmp_path, *sweep)
    (row,) = read_rows(tmp_path, "two").to_dict("records")
    assert (row["status"], row["world_size"]) == ("ok", 4), row["reason"]
    assert row["loss_deviation"] < 1e-5 and row["grad_deviation"] < 1e-4
    assert {path.name for path in (tmp_path / "two" / row["run_id"] / "logs").glob("rank_*")} == {
        f"rank_{rank}.log" for rank in range(4)
    }
    (job,) = (job for job in ray.jobs() if job in output)
    wait_for(lambda: ray.jobs()[job] == "SUCCEEDED", 60, "the driver has ended")
    assert len(list((tmp_path / "two" / ".jobs").glob(f"{job}_*.log"))) == 2
    assert SECRET not in repr(ray.client().get_job_info(job)) + ray.client().get_job_logs(job)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert "is recorded" in harness(ray, tmp_path, *sweep)
    assert ray.jobs().keys() == {job}


def test_without_a_cluster_or_the_library_the_command_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_harness(tmp_path, "strategy=ddp", *RAY, "hydra.launcher.address=http://127.0.0.1:9")
    assert done.returncode == 2 and "hydra.launcher.address=http://127.0.0.1:9 leads to no Ray" in done.stderr
    monkeypatch.setattr(queue.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'training-harness\[ray\]'"):
        RayQueue({}).states({"a"})


def test_a_control_character_in_a_line_of_setup_is_refused(tmp_path: Path) -> None:
    done = run_harness(tmp_path, "strategy=ddp", *RAY, 'hydra.launcher.setup=["a\nplanted"]')
    assert done.returncode == 2 and "hydra/launcher=ray cannot write a control character" in done.stderr


@pytest.mark.long
def test_a_run_whose_node_is_lost_waits_for_another_and_is_made_again(ray: RayCluster, tmp_path: Path) -> None:
    """Its node comes back only after the job of the second attempt waits."""
    command = start_command(ray, tmp_path, "name=lost", *LONGER, "cluster.nodes=2", "retry_pause_seconds=1")
    wait_for_step(tmp_path, "lost")
    before = ray.jobs().keys()
    ray.kill_node(0)
    new = wait_for(lambda: ray.jobs().keys() - before, 120, "the run is submitted again")
    (job,) = new
    wait_for(lambda: "waiting for 2 nodes" in ray.client().get_job_logs(job), 60, "its driver waits")
    assert not list((tmp_path / "lost" / ".jobs").glob(f"{job}_*.log"))
    ray.add_node()
    output = command.communicate(timeout=300)[1]
    assert command.returncode == 0, output
    row = only_row(tmp_path, "lost")
    assert (row.status, row.attempts) == ("ok", 2) and row.earlier_ends


@pytest.mark.long
def test_a_lost_node_that_led_is_a_row_and_the_next_command_makes_it_again(ray: RayCluster, tmp_path: Path) -> None:
    command = start_command(ray, tmp_path, "name=led", *LONGER, "cluster.nodes=2", "retries=0")
    run_dir = wait_for_step(tmp_path, "led")
    (answering,) = (tmp_path / "led" / ".jobs").glob("*.started.json")
    leader = rank_process(run_dir, 0)
    ancestors = {process.pid for process in leader.parents()}
    (index,) = (
        number for number, node in enumerate(ray.nodes) if node.all_processes["raylet"][0].process.pid in ancestors
    )
    ray.kill_node(index)
    output = command.communicate(timeout=200)[1]
    assert command.returncode == 1, output
    row = only_row(tmp_path, "led")
    assert row.status == "error" and "ended as FAILED with a lost node" in row.reason and row.ended_from_outside
    ray.add_node()
    harness(ray, tmp_path, "name=led", *LONGER, "cluster.nodes=2")
    assert only_row(tmp_path, "led").status == "ok" and answering.exists()


@pytest.mark.long
def test_a_command_reuses_the_jobs_of_a_killed_command(ray: RayCluster, tmp_path: Path) -> None:
    sweep = ("-m", "name=again", "train.seed=0,1", *LONGER)
    first = start_command(ray, tmp_path, *sweep)
    wait_for_step(tmp_path, "again")
    first.kill()
    first.communicate()
    jobs = ray.jobs()
    harness(ray, tmp_path, *sweep)
    assert ray.jobs().keys() == jobs.keys()
    assert list(read_rows(tmp_path, "again").status) == ["ok", "ok"]


@pytest.mark.long
def test_a_stopped_job_is_an_interrupted_row(ray: RayCluster, tmp_path: Path) -> None:
    command = start_command(ray, tmp_path, "name=stopped", *LONGER, "cluster.nodes=2")
    wait_for_step(tmp_path, "stopped")
    (job,) = (job for job, state in ray.jobs().items() if state == "RUNNING")
    status = run_harness_status(tmp_path / "stopped")
    assert "its Ray job is waiting for nodes or running" in status
    ray.client().stop_job(job)
    output = command.communicate(timeout=120)[1]
    assert command.returncode == 1, output
    assert only_row(tmp_path, "stopped").status == "interrupted"


def run_harness_status(comparison: Path) -> str:
    """Return what `harness status` prints of a comparison."""
    words = [sys.executable, "-m", "harness", "status", str(comparison)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_a_run_that_hangs_is_a_row_and_frees_its_nodes(ray: RayCluster, tmp_path: Path) -> None:
    command = start_command(ray, tmp_path, "name=hang", *LONGER, "cluster.nodes=2", "hang_seconds=30", "retries=0")
    rank = rank_process(wait_for_step(tmp_path, "hang"), 3)
    assert rank.nice() == psutil.Process().nice()
    rank.suspend()
    output = command.communicate(timeout=200)[1]
    assert command.returncode == 1, output
    row = only_row(tmp_path, "hang")
    assert row.status == "timeout" and "without progress of any rank" in row.reason, row.reason
    wait_for(lambda: "RUNNING" not in ray.jobs().values(), 60, "the job has ended")
    harness(ray, tmp_path, "name=after", "strategy=ddp", "cluster.nodes=2", "proof.reference=false", *SMALL)


@pytest.mark.long
def test_a_run_whose_retries_are_exhausted_is_a_row_with_its_attempts(ray: RayCluster, tmp_path: Path) -> None:
    arguments = ("name=exhausted", *LONGER, "cluster.nodes=2", "retries=1", "retry_pause_seconds=1")
    command = start_command(ray, tmp_path, *arguments)
    first = rank_process(wait_for_step(tmp_path, "exhausted"), 3)
    first.kill()
    wait_for(lambda: len(list((tmp_path / "exhausted" / ".jobs").glob("*_0.log"))) == 2, 120, "a second job")
    run_dir = wait_for(lambda: next((tmp_path / "exhausted").glob("*/run.json"), None), 60, "its run").parent

    def second() -> psutil.Process | None:
        with suppress(ValueError):
            process = rank_process(run_dir, 3)
            return process if process.pid != first.pid else None
        return None

    process = wait_for(second, 120, "the rank runs again")
    wait_for_step(tmp_path, "exhausted")
    process.kill()
    output = command.communicate(timeout=200)[1]
    assert command.returncode == 1, output
    row = only_row(tmp_path, "exhausted")
    assert (row.status, row.attempts) == ("error", 2) and "SIGKILL" in row.reason, row.reason


@pytest.mark.long
def test_a_run_whose_head_dies_is_a_row(tmp_path: Path) -> None:
    """The head's raylet is killed, and with it the driver of the job; its dashboard still answers."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_cluster(Path(folder)) as ray:
        command = start_command(ray, tmp_path, "name=head", *LONGER, "train.steps=3000", "cluster.nodes=2", "retries=0")
        wait_for_step(tmp_path, "head")
        ray.cluster.head_node.all_processes["raylet"][0].process.kill()
        output = command.communicate(timeout=200)[1]
        assert command.returncode == 1, output
        row = only_row(tmp_path, "head")
        assert row.status == "error" and row.ended_from_outside and "Ray's job" in row.reason, row.reason
