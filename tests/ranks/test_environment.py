"""The environment in a record: what the machine is without any secret, what ranks cost it, and what disturbed them."""

import hashlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config.schema import ClusterConfig
from harness.measure.environment import (
    PREFIXES,
    SETTINGS,
    VARIABLES,
    changed_settings,
    collect_environment,
    relevant_variables,
)
from harness.measure.host_usage import HostUsageMeter, peak_rss_bytes
from harness.metrics.step_time import disturbance_text, trend_text
from harness.records.rank_report import HostUsage
from harness.runner.resolve import detect_machine
from tests.support.commands import ROOT

MACHINE = detect_machine(ClusterConfig(name="local", nodes=1, gpus_per_node=None, device="auto"))

CANARY = "hunter2"

SECRET_WORDS = ("Key", "Token", "Secret", "Pass", "Password", "Passwd", "Auth", "Credential", "Cookie", "Jwt", "Pat")

HARMLESS_WORDS = ("PATH", "PATTERN", "AUTHOR", "PASSES", "BYPASS", "MONKEY", "TOKENIZER", "COMPASS", "PATCH", "KEYED")


@given(
    prefix=st.sampled_from(PREFIXES),
    before=st.sampled_from(("", "A_", "my", "z9")),
    word=st.sampled_from(SECRET_WORDS),
    after=st.sampled_from(("", "_B", "2", "_9z")),
)
def test_variables_with_secret_names_are_left_out(prefix: str, before: str, word: str, after: str) -> None:
    """A word is a word of a name by case or by other characters around it."""
    assert not relevant_variables({prefix + before + word + after: CANARY}, ())
    if before != "my":
        assert not relevant_variables({prefix + before + word.upper() + after: CANARY}, ())
    harmless = {prefix + harmless + after: CANARY for harmless in HARMLESS_WORDS}
    assert relevant_variables(harmless, ()) == dict(sorted(harmless.items()))


@pytest.mark.parametrize(
    "value",
    [
        f"https://me:{CANARY}@proxy:8080",
        f"http://{CANARY}@host/path",
        f"s3://bucket/path?X-Signature={CANARY}",
        f"a,socks5://u:{CANARY}@h",
        f"--password={CANARY}",
        f"Authorization: Bearer {CANARY}",
        f"auth_token={CANARY}",
    ],
)
def test_variables_with_secret_values_are_left_out(value: str) -> None:
    for name in (*VARIABLES, *(f"{prefix}X" for prefix in PREFIXES)):
        assert not relevant_variables({name: value}, ())


def test_relevant_variables_are_recorded_unchanged() -> None:
    others = ("PATH", "HOME", "USER", "AWS_REGION", "WANDB_MODE", "SLURM_JOB_ID", "SLURM_JOB_USER", "XNCCL_DEBUG", "CC")
    chosen = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
        "CXX": "clang++",
        "SLURM_NTASKS": "8",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    assert relevant_variables(dict.fromkeys(others, "x") | chosen, ()) == chosen


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me", "~"),
        ("/home/me/lib:/opt/lib:/home/me/cuda/lib", "~/lib:/opt/lib:~/cuda/lib"),
        ("-O2 -I/home/me/include", "-O2 -I~/include"),
        ("file=/home/me/a b", "file=~/a b"),
        ("/home/mel/lib", "/home/mel/lib"),
        ("/mnt/home/me/lib", "/mnt/home/me/lib"),
        ("/home/me.old/lib", "/home/me.old/lib"),
        ("/real/me/lib", "~/lib"),
    ],
)
def test_the_home_folder_is_written_as_a_tilde(value: str, shown: str) -> None:
    assert relevant_variables({"LD_LIBRARY_PATH": value}, ("/home/me", "/real/me")) == {"LD_LIBRARY_PATH": shown}


def test_changed_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names of the allocator's settings count; threads, devices and secrets do not."""
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)
    for name, value in (("PYTORCH_CUDA_ALLOC_CONF", "x"), ("NCCL_ALGO", "Ring"), ("NVIDIA_TF32_OVERRIDE", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_AUTH", CANARY)
    recorded = {
        "NCCL_ALGO": "Tree",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "OMP_NUM_THREADS": "9",
    }
    changed = ["NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_BLOCKING_WAIT"]
    assert changed_settings(recorded) == changed
    assert changed_settings(collect_environment(MACHINE)["variables"]) == []


def test_the_current_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    monkeypatch.setenv("NCCL_TOPO_FILE", f"{home}/topology.xml")
    monkeypatch.setenv("NCCL_AUTH", CANARY)
    environment = collect_environment(MACHINE)
    assert environment["variables"]["NCCL_TOPO_FILE"] == "~/topology.xml" and CANARY not in json.dumps(environment)
    monkeypatch.delenv("NCCL_TOPO_FILE")
    assert "NCCL_TOPO_FILE" not in collect_environment(MACHINE)["variables"]


def test_the_environment_is_plain_json() -> None:
    environment = collect_environment(MACHINE, threads=3)
    assert environment["device"] == MACHINE.device and environment["device_name"] == MACHINE.device_name
    assert (environment["devices"], environment["cores"], environment["threads"]) == (MACHINE.devices, MACHINE.cores, 3)
    assert environment["host_memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert environment["system"].split()[0] == os.uname().sysname and isinstance(environment["variables"], dict)
    assert json.loads(json.dumps(environment)) == environment
    assert not any(value in ("", -1) for value in environment.values()), environment
    assert environment["numpy"] and environment["processor"] and environment["instructions"]


def test_the_compiler_is_that_of_the_variable_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my c++"
    compiler.write_text("#!/bin/sh\necho own compiler 1.2.3 $1\necho second line\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{compiler}'")
    assert collect_environment(MACHINE)["compiler"] == "own compiler 1.2.3 --version"
    for broken in (str(tmp_path / "none"), "'open", "false"):
        monkeypatch.setenv("CXX", broken)
        assert collect_environment(MACHINE)["compiler"] is None


def test_devices_that_nvml_does_not_know_are_unknown() -> None:
    """On a machine without its driver nothing is invented from a count of devices alone."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        pytest.skip("this machine has NVIDIA's driver")
    except pynvml.NVMLError:
        pass
    environment = collect_environment(replace(MACHINE, devices=2))
    assert [environment[key] for key in ("driver", "device_names", "power_limits_watts", "topology")] == [None] * 4


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


SPIN = "import time, sys\nprint(flush=True)\nend = time.time() + 30\nwhile time.time() < end: pass"


@contextmanager
def busy_processes() -> Iterator[list[psutil.Process]]:
    """Keep one process per core busy during the block."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) for _ in range(MACHINE.cores)]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def used_while(work: Callable[[], None], helpers: list[psutil.Process] | None = None) -> dict[str, Any]:
    usage = HostUsageMeter([torch.device("cpu")], helpers)
    usage.begin()
    work()
    return asdict(usage.end())


QUIET_STEPS = [0.05, 0.051, 0.049, 0.05, 0.052, 0.05, 0.05, 0.049, 0.051, 0.05]


def test_busy_processes_are_reported_as_a_disturbance() -> None:
    with busy_processes():
        used = used_while(lambda: spin(0.8))
    assert re.search(
        rf"other processes took \d+\.\d of {MACHINE.cores} cores", disturbance_text(QUIET_STEPS, [HostUsage(**used)])
    )
    assert used["busy_seconds"] < used["core_seconds"] + 0.001 and used["core_seconds"] > 0.5 * 0.8 * MACHINE.cores
    assert used["helper_cpu_seconds"] < 0.2 * used["seconds"]  # of whoever started the tests


def test_helpers_processor_time_is_that_of_the_interval() -> None:
    def theirs() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in helpers)

    with busy_processes() as helpers:
        spin(0.3)
        first = theirs()
        used = used_while(lambda: spin(0.5), helpers)
        assert 0 < used["helper_cpu_seconds"] <= theirs() - first + 0.01


def test_busy_time_is_that_of_ranks_and_helpers() -> None:
    """Every process of the machine counts as a rank or its helper, so that nothing is left to disturb two real ranks.

    Processes that come and go meanwhile are missed, so this is tried again.
    """
    for _ in range(10):
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            pids = set(pool.map(_pid, range(2)))
            before = _started()
            ranks = list(pool.map(_rank, [pids, pids]))
            alone = _started() == before
        assert {rank["pid"] for rank in ranks} == pids and len(pids) == 2
        text = disturbance_text(QUIET_STEPS, [HostUsage(**rank) for rank in ranks])
        if "other processes" not in text:
            return
        assert not alone, text
    pytest.skip("processes come and go on this machine all the time")


def _started() -> object:
    """Return a value that changes when a process starts or ends.

    On Linux it also changes for a process that starts and ends between two looks.
    """
    stat = Path("/proc/stat")
    ever = [line for line in stat.read_text().splitlines() if line.startswith("processes")] if stat.exists() else []
    return ever, psutil.pids()


def _pid(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def _rank(ranks: set[int]) -> dict[str, Any]:
    others = [process for process in psutil.process_iter() if process.pid not in ranks]
    return used_while(lambda: spin(0.6), others)


def test_processor_time_is_that_of_all_threads_in_the_interval() -> None:
    seconds: list[float] = []

    def work() -> None:
        begin = time.thread_time()
        hashlib.sha256(bytes(100_000_000))
        seconds.append(time.thread_time() - begin)

    spin(0.3)
    thread = threading.Thread(target=work)
    used = used_while(lambda: (thread.start(), thread.join()))
    assert seconds[0] <= used["cpu_seconds"] < seconds[0] + 0.1 and used["cpu_seconds"] <= 2 * used["seconds"]
    assert used["energy_joules"] is None and used["clocks_lowered"] is None and used["device_pids"] is None


@pytest.mark.parametrize("work", [lambda: collect_environment(MACHINE), lambda: used_while(lambda: None, helpers=[])])
def test_what_every_run_collects_and_meters_takes_less_than_a_millisecond(work: Callable[[], object]) -> None:
    work()
    assert min(timeit.repeat(work, number=1, repeat=50)) < 0.001


def test_peak_rss_is_the_processs_own_and_stays_after_a_free() -> None:
    filled = bytearray(500 * 2**20)
    probe = "from harness.measure.host_usage import peak_rss_bytes; print(peak_rss_bytes())"
    started = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    before = peak_rss_bytes()
    assert before is not None and len(filled) < before
    assert 2**20 < int(started.stdout) < before - 200 * 2**20  # torch alone; ru_maxrss would be this process's own
    more = bytearray(before)
    del more, filled
    after = peak_rss_bytes()
    assert after is not None and after > before + 200 * 2**20


RANK = {
    "pid": 10,
    "host": "a",
    "seconds": 10.0,
    "cpu_seconds": 9.0,
    "helper_cpu_seconds": 0.5,
    "cores": 4,
    "core_seconds": 40.0,
    "busy_seconds": 19.0,
    "stolen_seconds": 0.0,
    "clocks_lowered": None,
    "device_pids": None,
}

PAIR = [RANK, RANK | {"pid": 11}]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"busy_seconds": 18.5 + 4.0}, ""),  # a tenth of the cores, and the ticks' doubt
        ({"busy_seconds": 18.5 + 4.1}, "other processes took 0.4 of 4 cores"),
        ({"busy_seconds": 18.5 + 4.1, "helper_cpu_seconds": 1.0}, ""),
        ({"busy_seconds": 12.0, "cpu_seconds": 2.0}, ""),  # others took as much, and left the cores half empty
        ({"busy_seconds": 30.0, "cpu_seconds": 2.0}, "other processes took 2.5 of 4 cores"),
        ({"core_seconds": 80.0, "busy_seconds": 30.0}, ""),
        ({"seconds": 0.29, "busy_seconds": 30.0, "stolen_seconds": 9.0}, ""),  # too short to say
        ({"stolen_seconds": 2.0}, ""),
        ({"stolen_seconds": 4.0}, "other virtual machines took 0.4 of 4 cores"),
        ({"stolen_seconds": None}, ""),
        ({"clocks_lowered": [], "device_pids": [10, 11]}, ""),
        ({"clocks_lowered": ["power limit"]}, ""),
        ({"clocks_lowered": ["heat", "power limit"]}, "a device's clocks were lowered (heat)"),
        ({"device_pids": [11, 77, 10]}, "other processes on a device (77)"),
    ],
)
def test_disturbances_are_named(changes: dict[str, Any], text: str) -> None:
    assert disturbance_text(QUIET_STEPS, [HostUsage(**rank | changes) for rank in PAIR]) == text


def test_each_host_is_judged_by_its_own_ranks() -> None:
    crowded = RANK | {"host": "b", "busy_seconds": 30.0}
    assert (
        disturbance_text([], [HostUsage(**rank) for rank in (*PAIR, crowded)])
        == "other processes took 2.0 of 4 cores on b"
    )
    assert disturbance_text([], [HostUsage(**RANK | {"busy_seconds": 30.0}), HostUsage(**PAIR[1])]) == ""
    assert disturbance_text([0.1] * 5 + [0.2] * 5, [HostUsage(**crowded | {"clocks_lowered": ["heat"]})]) == (
        "steps became 100% slower from the first third to the last; other processes took 2.0 of 4 cores;"
        " a device's clocks were lowered (heat)"
    )
    assert disturbance_text([], []) == ""


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([0.1] * 8 + [9.0], ""),  # one slow step
        ([0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2], ""),  # too few
        ([0.1] * 4 + [0.13] * 5, "steps became 30% slower from the first third to the last"),
        ([0.13] * 4 + [0.1] * 5, "steps became 23% faster from the first third to the last"),
        ([0.1] * 4 + [0.109] * 5, ""),  # within the bound
        ([0.1, 0.14, 0.12, 0.1, 0.13, 0.1, 0.14, 0.16, 0.12], ""),  # within the scatter
        ([0.1 + 0.002 * step for step in range(30)], "steps became 37% slower from the first third to the last"),
        ([0.1, 0.2] * 15, ""),
        (QUIET_STEPS, ""),
    ],
)
def test_a_trend_is_more_than_bound_and_scatter(steps: list[float], text: str) -> None:
    assert trend_text(steps) == text


@pytest.mark.parametrize(("steps", "wrongly"), [(10, 0.03), (50, 0.005)])
def test_noise_alone_is_seldom_called_a_trend(steps: int, wrongly: float) -> None:
    chance = random.Random(0)
    kinds: list[Callable[[], float]] = [
        lambda: chance.gauss(1, 0.05),
        lambda: max(0.1, chance.gauss(1, 0.2)),
        lambda: 1 + chance.gauss(0, 0.03) + (chance.random() < 0.2) * chance.expovariate(1),
    ]
    for kind in kinds:
        assert sum(bool(trend_text([kind() for _ in range(steps)])) for _ in range(1000)) <= 1000 * wrongly
