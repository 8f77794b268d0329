"""The launcher with real processes: how a run ends, what reason it gives, and that no process is left."""

import json
import multiprocessing.forkserver
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException

from harness.launcher.forkserver import LIBRARIES, PRELOADS, threads_per_rank
from harness.launcher.launch import LaunchOutcome, NodeInfo, _store, launch
from harness.launcher.monitor import HangDetector, monitor_ranks
from harness.util.parent_death import PARENT_VARIABLE
from tests.support import launch_entries
from tests.support.processes import MARK, ROOT, Command, living, seconds_until_gone

Entry = Callable[[str], None]

# The limit of launches that succeed, which only a hang reaches.
HANG_SECONDS = 240.0

# The time in which all processes of a killed parent must be gone. A rank that does not notice lives until that limit.
# A forkserver that is importing notices at the end of its imports, which takes seconds on a busy machine.
GONE_SECONDS = 90.0

# A parent process that prints when it launches and how that ended. `lean` and `warm` preload less than the product
# does, to be quick; `warm` has its forkserver ready, and nothing but their lifeline binds the ranks of `unbound`.
PARENT = """
import sys
from pathlib import Path
from tests.support import launch_entries
from harness.launcher.launch import NodeInfo, launch
entry, run_dir, kind, node = sys.argv[1:]
rank, port = map(int, node.split(":"))
nodes = NodeInfo(2, rank, master_port=port) if port else NodeInfo()
unbound = ["harness.launcher.rank_entry", "torch.distributed.elastic.multiprocessing.api"]
lean = ["harness.launcher.parent_death", *unbound]
preload = {"product": None, "unbound": unbound, "lean": lean, "warm": lean}[kind]
def go(name):
    function = getattr(launch_entries, name)
    return launch(
        function, Path(run_dir), 2 * nodes.count, device="cpu", timeout_seconds=240, nodes=nodes, preload=preload
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
import harness.launcher.preload_cpu
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


@pytest.fixture(scope="module", autouse=True)
def cold_seconds(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the seconds of a first launch, imports in the forkserver included.

    A forkserver that other tests left is stopped first.
    """
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    outcome = launched(launch_entries.all_reduce, tmp_path_factory.mktemp("cold"))
    assert outcome.status == "ok", outcome.reason
    return outcome.seconds


def parent(run_dir: Path, entry: str, kind: str, node: str = "0:0") -> Command:
    """Start a parent process, whose every descendant has its mark in the environment."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", PARENT, entry, str(run_dir), kind, node]
    environment = os.environ | {"PYTHONPATH": str(ROOT), MARK: mark}
    log = run_dir / "output"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=run_dir, env=environment, stdout=out, stderr=out)
    return Command(process, mark, log)


def wait_for(is_there: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + HANG_SECONDS
    while not is_there():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def launched(
    entry: Entry, run_dir: Path, world_size: int = 2, limit_seconds: float = HANG_SECONDS, **others: Any
) -> LaunchOutcome:
    return launch(entry, run_dir, world_size, device="cpu", timeout_seconds=limit_seconds, **others)


def results(run_dir: Path, world_size: int) -> list[dict[str, Any]]:
    """Return what every rank wrote."""
    return [json.loads((run_dir / f"seen_{rank}.json").read_text()) for rank in range(world_size)]


def hanging_pids(run_dir: Path) -> list[int]:
    """Return the process ids of the ranks that hang in hangs_in_collective()."""
    return [int(path.read_text()) for path in run_dir.glob("pid_?")]


def test_logs_keep_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SERVICE_PASS", "hunter2x")
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # its ranks have its environment
    outcome = launched(launch_entries.leaks, tmp_path)
    assert outcome.status == "error" and "401" in outcome.reason
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs["rank_0.log"].count("[secret]") >= 4 and "from a child process" in logs["rank_1.log"]
    assert not any("hunter2x" in text for text in logs.values())


def test_ranks_run_a_collective_and_log_their_output(
    tmp_path: Path, cold_seconds: float, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = launched(launch_entries.all_reduce, tmp_path, 3)
    assert (outcome.status, outcome.reason, outcome.failures) == ("ok", "", ())
    for rank, values in enumerate(results(tmp_path, 3)):
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
        outcome = launched(launch_entries.all_reduce, tmp_path, 3)
    assert outcome.seconds < cold_seconds


def test_forked_ranks_have_no_device_and_no_process_group(tmp_path: Path) -> None:
    """Forked ranks have no device, no process group and only the leash's threads; the preload is imported."""
    outcome = launched(launch_entries.describe, tmp_path)
    assert outcome.status == "ok", outcome.reason
    for values in results(tmp_path, 2):
        assert values["imported"] == ["deepspeed", "torch.distributed.fsdp", "torch.distributed.pipelining"]
        assert not values["cuda_initialized"] and not values["process_group"]
        assert values["forked"] == 7
        assert values["forkserver_threads"] in (1, None)  # known on Linux alone


def test_ranks_have_the_libraries_of_their_runs_and_of_those_before(tmp_path: Path) -> None:
    for each, libraries in (("first", [*LIBRARIES]), ("second", [])):
        (tmp_path / each).mkdir()
        outcome = launched(launch_entries.describe, tmp_path / each, 1, libraries=libraries)
        assert outcome.status == "ok", outcome.reason
        (values,) = results(tmp_path / each, 1)
        assert values["libraries"] == ["peft", "torchao", "transformers.modeling_utils"]
        assert values["forkserver_threads"] in (1, None)


def test_preload_imports_and_does_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", PRELOADED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["threads"] == 1 and values["collecting"]
    assert values["elements"] <= 1  # one of torch's own modules keeps a scalar
    assert values["switch"] is None  # a rank would inherit it
    assert values["frozen"] > 100_000  # torch alone makes more
    modules = set(values["modules"])
    assert not modules & {"torchao", "peft"}  # which few ranks need, and which take seconds
    engines = {
        "harness.engines.torch.pipeline_parallel",
        "harness.engines.deepspeed.initialize",
        "harness.engines.accelerate",
    }
    assert modules >= {"deepspeed.runtime.zero.muon.muon_optimizer", *engines}
    assert "torch._inductor.compile_fx" not in modules  # the compiler: slow to import, and it may start processes


@pytest.mark.parametrize(
    ("entry", "exit_code", "reason", "logged"),
    [
        (
            launch_entries.one_raises,
            1,
            "rank 1 raised ValueError: the boom of rank 1.*a word before the end.*",
            "Traceback",
        ),
        *[
            (
                launch_entries.one_is_killed,
                -signal.SIGKILL,
                "rank 1 was killed by SIGKILL.*its log ends: a word before the end.*",
                "a word before the end",
            )
        ]
        * 3,
        (launch_entries.one_leaves, 0, "rank 1 exited with code 0 before it had finished.*", ""),
    ],
)
def test_the_rank_that_failed_is_named_before_its_peers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], entry: Entry, exit_code: int, reason: str, logged: str
) -> None:
    outcome = launched(entry, tmp_path, 3)
    first = outcome.failures[0]
    assert (outcome.status, first.rank, first.exit_code) == ("error", 1, exit_code), outcome
    assert re.fullmatch(reason, outcome.reason), outcome.reason
    assert logged in (tmp_path / "logs" / "rank_1.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_the_time_limit_kills_all_ranks_and_ticks_go_on(tmp_path: Path, cold_seconds: float) -> None:
    ticks: list[float] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    limit_seconds = max(2.0, cold_seconds)  # in which warm ranks come to hang, however slow the machine is
    outcome = launched(
        *(launch_entries.hangs_in_collective, tmp_path, 2, limit_seconds),
        on_tick=lambda: ticks.append(time.monotonic()),
    )
    assert outcome.status == "timeout" and "unfinished: rank 0, 1" in outcome.reason
    assert limit_seconds <= outcome.seconds < HANG_SECONDS  # without the limit they would hang for an hour
    assert 3 <= len(ticks) <= 1 + outcome.seconds / 0.2
    assert not any(map(psutil.pid_exists, hanging_pids(tmp_path)))
    assert before == {number: signal.getsignal(number) for number in before}
    assert threading.active_count() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_interrupts(tmp_path: Path, number: signal.Signals) -> None:
    handler = signal.signal(number, signal.default_int_handler)  # a background job's shell may have it ignored
    sent: list[signal.Signals] = []

    def send_once() -> None:
        if len(hanging_pids(tmp_path)) == 2 and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    outcome = launched(launch_entries.hangs_in_collective, tmp_path, on_tick=send_once)
    signal.signal(number, handler)
    assert outcome.status == "interrupted" and outcome.seconds < HANG_SECONDS
    assert not any(map(psutil.pid_exists, hanging_pids(tmp_path)))


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


def test_two_nodes_run_one_collective(tmp_path: Path) -> None:
    """Two parents act as a machine each, and each starts and logs its own ranks.

    The store ends with the first parent. torch may print on the other that it lost it while both were leaving.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = parent(tmp_path, "all_reduce", "lean", node=f"1:{port}")
    nodes = NodeInfo(count=2, rank=0, master_port=port)
    outcome = launched(launch_entries.all_reduce, tmp_path, 4, nodes=nodes)
    assert outcome.status == "ok", outcome.reason
    assert other.wait() == 0 and other.output().startswith("go\n") and other.output().endswith("ok \n")
    assert [values["sum"] for values in results(tmp_path, 4)] == [10.0] * 4
    assert sorted(path.name for path in (tmp_path / "logs").glob("rank_*")) == [f"rank_{r}.log" for r in range(4)]


def test_an_exception_of_a_tick_is_raised(tmp_path: Path) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launched(launch_entries.all_reduce, tmp_path, on_tick=broken)
    assert (tmp_path / "seen_1.json").exists()


def test_a_parent_starts_ranks_of_two_kinds_of_device(tmp_path: Path) -> None:
    """One parent starts another kind of device and then the first again; each is forked from its own preload.

    That of GPUs lacks DeepSpeed alone, and an import that initialized CUDA would end it.
    """
    outcome = launched(launch_entries.describe, tmp_path, 1, preload=PRELOADS["cuda"])
    assert outcome.status == "ok", outcome.reason
    (values,) = results(tmp_path, 1)
    assert values["imported"] == ["torch.distributed.fsdp", "torch.distributed.pipelining"]
    assert values["forkserver_threads"] in (1, None) and not values["cuda_initialized"]
    fault = "import torch; torch.cuda.is_initialized = lambda: True; import harness.launcher.preload"
    done = subprocess.run([sys.executable, "-c", fault], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "AssertionError: an import initialized CUDA" in done.stderr


@pytest.mark.long
def test_two_parents_launch_at_once(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    other = parent(theirs, "all_reduce", "lean")
    while other.process.poll() is None:
        outcome = launched(launch_entries.all_reduce, ours)
        assert outcome.status == "ok", outcome.reason
    assert other.output() == "go\nok \n"
    assert [values["sum"] for run in (ours, theirs) for values in results(run, 2)] == [3.0] * 4


CHANCE = random.Random(20)

KILLS: list[tuple[str, float | None]] = [  # how the parent starts its ranks, seconds from there to its death
    ("product", 0.0),
    ("product", CHANCE.uniform(0.1, 2.0)),  # while the forkserver imports
    ("warm", CHANCE.uniform(0.0, 0.1)),  # while the ranks are being forked
    ("warm", CHANCE.uniform(0.1, 0.5)),
    ("warm", None),  # when they hang in a collective
    ("unbound", None),
]


def kill_one(run_dir: Path, kind: str, after_seconds: float | None) -> float:
    """Return how long any process of a parent lives on after the parent was killed."""
    run_dir.mkdir()
    command = parent(run_dir, "hangs_in_collective", kind)
    wait_for(lambda: "go\n" in command.output())
    if after_seconds is None:
        wait_for(lambda: len(hanging_pids(run_dir)) == 2)
        assert len(living(command)) >= 3  # the parent and two ranks: the mark does find them
    time.sleep(0.2 if after_seconds is None else after_seconds)
    command.process.kill()
    command.wait()
    lived_on_seconds, left = seconds_until_gone(command, GONE_SECONDS)
    assert left == []
    return lived_on_seconds


def test_a_folder_for_temporary_files_has_room_for_a_socket(tmp_path: Path) -> None:
    (folder := tmp_path / ("t" * 80)).mkdir()
    code = "from harness.launcher.forkserver import start_forkserver; start_forkserver('cpu')"
    variables = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, check=False)
    assert f"TMPDIR={folder} is too long a path for sockets".encode() in done.stderr


def test_a_forkserver_whose_parent_died_before_its_first_import_ends() -> None:
    """It has another parent then."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True)
    code = "import harness.launcher.parent_death, time; time.sleep(20)"
    variables = os.environ | {PARENT_VARIABLE: gone.stdout.decode().strip()}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, timeout=15, check=False)
    assert done.returncode == -signal.SIGKILL


def test_nothing_outlives_a_killed_parent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(max_workers=3) as pool:
        lived_on = list(pool.map(lambda case: kill_one(tmp_path / str(KILLS.index(case)), *case), KILLS))
    with capfd.disabled():
        print("\n  lived on: " + ", ".join(f"{seconds:.2f} s" for seconds in lived_on))
