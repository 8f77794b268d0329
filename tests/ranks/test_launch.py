"""The launcher with real processes: how a run ends, what reason it gives, and that no process is left."""

import json
import multiprocessing.forkserver
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException

from harness.launcher.forkserver import START_METHODS, threads_per_rank
from harness.launcher.launch import NodeInfo, _store, launch
from harness.launcher.monitor import HangDetector, monitor_ranks
from tests.support import launch_entries

ROOT = Path(__file__).parents[2]

# The limit of launches that succeed, which only a hang reaches.
HANG_SECONDS = 240.0

# The time in which all processes of a killed parent must be gone. A rank that does not notice lives until that limit.
# A forkserver that is importing notices at the end of its imports, which takes seconds on a busy machine.
GONE_SECONDS = 90.0

MARK = "LAUNCH_TEST_MARK"

# A parent process that prints when it launches and how that ended. `lean` and `warm` preload less than the product
# does, to be quick; `warm` has its forkserver ready.
PARENT = """
import sys
from pathlib import Path
from tests.support import launch_entries
from harness.launcher.forkserver import START_METHODS, StartMethod
from harness.launcher.launch import NodeInfo, launch
entry, run_dir, kind, node = sys.argv[1:]
rank, port = map(int, node.split(":"))
nodes = NodeInfo(2, rank, master_port=port) if port else NodeInfo()
lean = StartMethod(
    "forkserver",
    ("harness.launcher.parent_death", "harness.launcher.rank_entry", "torch.distributed.elastic.multiprocessing.api"),
)
start = {"product": START_METHODS["cpu"], "spawn": StartMethod("spawn", ()), "lean": lean, "warm": lean}[kind]
def go(name):
    function = getattr(launch_entries, name)
    return launch(
        function, Path(run_dir), 2 * nodes.count, device="cpu", timeout_seconds=240, nodes=nodes, start=start
    )
if kind == "warm":
    go("nothing")
print("go", flush=True)
outcome = go(entry)
print(outcome.status, outcome.reason, flush=True)
"""

# The state of the forkserver when it is ready to fork.
PRELOADED = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import harness.launcher.preload
import gc, json, sys, threading
import torch
frozen = gc.get_freeze_count()
gc.unfreeze()
print(json.dumps({
    "switch": os.environ.get("TORCHDYNAMO_DISABLE"),
    "frozen": frozen,
    "collecting": gc.isenabled(),
    "threads": threading.active_count(),
    "elements": sum(value.numel() for value in gc.get_objects() if isinstance(value, torch.Tensor)),
    "modules": sorted(sys.modules),
}))
"""


@pytest.fixture(scope="module")
def cold_seconds(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the seconds of a first launch, imports in the forkserver included.

    A forkserver that other tests left is stopped first.
    """
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    outcome = launch(
        launch_entries.all_reduce, tmp_path_factory.mktemp("cold"), 2, device="cpu", timeout_seconds=HANG_SECONDS
    )
    assert outcome.status == "ok", outcome.reason
    return outcome.seconds


def parent(run_dir: Path, entry: str, kind: str, mark: str = "", node: str = "0:0") -> subprocess.Popen[str]:
    """Start a parent process, whose every descendant has the mark in its environment."""
    command = [sys.executable, "-c", PARENT, entry, str(run_dir), kind, node]
    environment = os.environ | {"PYTHONPATH": str(ROOT), MARK: mark}
    return subprocess.Popen(
        command, cwd=run_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes with that mark."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def seconds_until_gone(mark: str) -> float:
    started_at = time.monotonic()
    while left := marked_processes(mark):
        if time.monotonic() - started_at > GONE_SECONDS:
            for process in left:
                process.kill()
            pytest.fail(f"alive after {GONE_SECONDS} s: {[process.pid for process in left]}")
        time.sleep(0.02)
    return time.monotonic() - started_at


def wait_for(path: Path, patience: float = HANG_SECONDS) -> None:
    ends_at = time.monotonic() + patience
    while not path.exists():
        assert time.monotonic() < ends_at, f"{path} did not appear"
        time.sleep(0.01)


def test_ranks_run_a_collective_and_log_their_output(
    tmp_path: Path, cold_seconds: float, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = launch(launch_entries.all_reduce, tmp_path, 3, device="cpu", timeout_seconds=HANG_SECONDS)
    assert (outcome.status, outcome.reason, outcome.failures) == ("ok", "", ())
    for rank in range(3):
        values = json.loads((tmp_path / f"seen_{rank}.json").read_text())
        assert values["sum"] == 6.0
        assert (values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert values["DS_ACCELERATOR"] == "cpu"
        assert values["OMP_NUM_THREADS"] == str(threads_per_rank(3))
        assert Path(values["path"].split(os.pathsep)[0]) == Path(sys.executable).parent
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert {"printed", "complained", "from a child process"} <= set(log)
    assert capfd.readouterr() == ("", "")
    with capfd.disabled():
        print(f"\n  first launch {cold_seconds:.2f} s, second {outcome.seconds:.2f} s (3 ranks)")
    if outcome.seconds >= cold_seconds:  # something else may have kept the machine busy
        outcome = launch(launch_entries.all_reduce, tmp_path, 3, device="cpu", timeout_seconds=HANG_SECONDS)
    assert outcome.seconds < cold_seconds


def test_forked_ranks_have_no_device_and_no_process_group(tmp_path: Path, cold_seconds: float) -> None:
    """Forked ranks have no device, no process group and only the leash's threads; the preload is imported."""
    outcome = launch(launch_entries.describe, tmp_path, 2, device="cpu", timeout_seconds=HANG_SECONDS)
    assert outcome.status == "ok", outcome.reason
    for rank in range(2):
        values = json.loads((tmp_path / f"seen_{rank}.json").read_text())
        assert values["imported"] == ["deepspeed", "torch.distributed.fsdp", "torch.distributed.pipelining"]
        assert not values["cuda_initialized"] and not values["process_group"]
        assert values["forked"] == 7
        if sys.platform == "linux":
            assert values["forkserver_threads"] == 1


def test_preload_imports_and_does_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", PRELOADED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["threads"] == 1 and values["collecting"]
    assert values["elements"] <= 1  # one of torch's own modules keeps a scalar
    assert values["switch"] is None  # a rank would inherit it
    assert values["frozen"] > 100_000  # torch alone makes more
    modules = set(values["modules"])
    engines = {
        "harness.engines.torch.pipeline_parallel",
        "harness.engines.deepspeed.initialize",
        "harness.engines.accelerate",
    }
    assert modules >= {"deepspeed.runtime.zero.muon.muon_optimizer", *engines}
    assert "torch._inductor.compile_fx" not in modules  # the compiler: slow to import, and it may start processes


def test_an_exception_names_its_rank(tmp_path: Path, cold_seconds: float, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = launch(launch_entries.one_raises, tmp_path, 2, device="cpu", timeout_seconds=HANG_SECONDS)
    assert outcome.status == "error"
    assert outcome.reason.startswith("rank 1 raised ValueError: the boom of rank 1")
    assert "a word before the end" in outcome.reason and "\n" not in outcome.reason
    assert outcome.failures[0].rank == 1 and outcome.failures[0].exit_code == 1
    assert "Traceback" in (tmp_path / "logs" / "rank_1.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_a_killed_rank_is_named_before_its_peers(tmp_path: Path, cold_seconds: float) -> None:
    for attempt in range(3):
        run_dir = tmp_path / str(attempt)
        outcome = launch(launch_entries.one_is_killed, run_dir, 3, device="cpu", timeout_seconds=HANG_SECONDS)
        first = outcome.failures[0]
        assert (outcome.status, first.rank, first.exit_code, first.signal) == ("error", 1, -9, "SIGKILL"), outcome
        assert outcome.reason.startswith("rank 1 was killed by SIGKILL")
        assert "its log ends: a word before the end" in outcome.reason


def test_a_silent_exit_of_a_rank_is_an_error(tmp_path: Path, cold_seconds: float) -> None:
    outcome = launch(launch_entries.one_leaves, tmp_path, 2, device="cpu", timeout_seconds=HANG_SECONDS)
    assert outcome.status == "error"
    assert outcome.reason.startswith("rank 1 exited with code 0 before it had finished")


def test_the_time_limit_kills_all_ranks_and_ticks_go_on(tmp_path: Path, cold_seconds: float) -> None:
    ticks: list[float] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    limit_seconds = max(2.0, cold_seconds)  # in which warm ranks come to hang, however slow the machine is
    outcome = launch(
        launch_entries.hangs_in_collective,
        tmp_path,
        2,
        device="cpu",
        timeout_seconds=limit_seconds,
        on_tick=lambda: ticks.append(time.monotonic()),
    )
    assert outcome.status == "timeout" and "unfinished: rank 0, 1" in outcome.reason
    assert limit_seconds <= outcome.seconds < HANG_SECONDS  # without the limit they would hang for an hour
    assert 3 <= len(ticks) <= 1 + outcome.seconds / 0.2
    for rank in range(2):
        assert not psutil.pid_exists(int((tmp_path / f"pid_{rank}").read_text()))
    assert before == {number: signal.getsignal(number) for number in before}
    assert threading.active_count() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_interrupts(tmp_path: Path, cold_seconds: float, number: signal.Signals) -> None:
    handler = signal.signal(number, signal.default_int_handler)  # a background job's shell may have it ignored

    def send() -> None:
        for rank in range(2):
            wait_for(tmp_path / f"pid_{rank}")
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    outcome = launch(launch_entries.hangs_in_collective, tmp_path, 2, device="cpu", timeout_seconds=HANG_SECONDS)
    sender.join()
    signal.signal(number, handler)
    assert outcome.status == "interrupted" and outcome.seconds < HANG_SECONDS
    assert not any(psutil.pid_exists(int((tmp_path / f"pid_{rank}").read_text())) for rank in range(2))


def test_a_reused_port_has_an_empty_store() -> None:
    """The kernel reuses ports, so the server that the agent opens must be this run's, and empty."""
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    first.set("left", "over")
    port = first.port
    del first
    for _ in range(2):
        store = _store(port)
        agents = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        assert not agents.check(["left"])
        agents.set("met", "here")
        assert store.get("met") == b"here"
        del store, agents


def test_signal_before_the_start_is_not_lost() -> None:
    with monitor_ranks(2, time.monotonic() + 60, HangDetector(lambda: None, 60), None) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SignalException):
            watch.arm()
    assert watch.stop_reason == "interrupted"


def test_two_nodes_run_one_collective(tmp_path: Path, cold_seconds: float) -> None:
    """Two parents act as a machine each, and each starts and logs its own ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = parent(tmp_path, "all_reduce", "lean", node=f"1:{port}")
    nodes = NodeInfo(count=2, rank=0, master_port=port)
    outcome = launch(launch_entries.all_reduce, tmp_path, 4, device="cpu", timeout_seconds=HANG_SECONDS, nodes=nodes)
    assert outcome.status == "ok", outcome.reason
    assert process.communicate(timeout=HANG_SECONDS)[0].splitlines() == ["go", "ok "]
    assert [json.loads((tmp_path / f"seen_{rank}.json").read_text())["sum"] for rank in range(4)] == [10.0] * 4
    assert sorted(path.name for path in (tmp_path / "logs").glob("rank_*")) == [f"rank_{r}.log" for r in range(4)]


def test_an_exception_of_a_tick_is_raised(tmp_path: Path, cold_seconds: float) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(launch_entries.all_reduce, tmp_path, 2, device="cpu", timeout_seconds=HANG_SECONDS, on_tick=broken)
    assert (tmp_path / "seen_1.json").exists()


def test_a_parent_starts_ranks_of_two_kinds_of_device(tmp_path: Path, cold_seconds: float) -> None:
    """One parent starts another kind of device and then the first again; each is forked from its own preload."""
    outcome = launch(
        launch_entries.describe, tmp_path, 1, device="cpu", timeout_seconds=HANG_SECONDS, start=START_METHODS["cuda"]
    )
    assert outcome.status == "ok", outcome.reason
    assert json.loads((tmp_path / "seen_0.json").read_text())["imported"] == []


@pytest.mark.long
def test_two_parents_launch_at_once(tmp_path: Path, cold_seconds: float) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    process = parent(theirs, "all_reduce", "lean")
    while process.poll() is None:
        outcome = launch(launch_entries.all_reduce, ours, 2, device="cpu", timeout_seconds=HANG_SECONDS)
        assert outcome.status == "ok", outcome.reason
    out, complaints = process.communicate()
    assert (out.splitlines(), complaints) == (["go", "ok "], "")
    for run in (ours, theirs):
        assert json.loads((run / "seen_1.json").read_text())["sum"] == 3.0


CHANCE = random.Random(20)

KILLS: list[tuple[str, float | None]] = [  # how the parent starts its ranks, seconds from there to its death
    ("product", 0.0),
    ("product", CHANCE.uniform(0.1, 2.0)),  # while the forkserver imports
    ("warm", CHANCE.uniform(0.0, 0.1)),  # while the ranks are being forked
    ("warm", CHANCE.uniform(0.1, 0.5)),
    ("warm", None),  # when they hang in a collective
    ("spawn", None),
]


def kill_one(run_dir: Path, kind: str, after_seconds: float | None) -> float:
    """Return how long any process of a parent lives on after the parent was killed."""
    run_dir.mkdir()
    mark = uuid.uuid4().hex
    process = parent(run_dir, "hangs_in_collective", kind, mark)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    if after_seconds is None:
        wait_for(run_dir / "pid_0")
        wait_for(run_dir / "pid_1")
        time.sleep(0.2)
        assert len(marked_processes(mark)) >= 3  # the parent and two ranks: the mark does find them
    else:
        time.sleep(after_seconds)
    process.kill()
    process.wait()
    lived_on_seconds = seconds_until_gone(mark)
    process.communicate()
    return lived_on_seconds


def test_nothing_outlives_a_killed_parent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(max_workers=3) as pool:
        lived_on = list(pool.map(lambda case: kill_one(tmp_path / str(KILLS.index(case)), *case), KILLS))
    with capfd.disabled():
        print("\n  lived on: " + ", ".join(f"{seconds:.2f} s" for seconds in lived_on))
