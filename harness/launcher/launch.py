"""From the parent to the ranks: starts them through torch's elastic launcher, watches them, says how they ended."""

import logging
import math
import multiprocessing.forkserver
import os
import socket
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness.hardware.machine import usable_cores
from harness.hardware.oom_kills import oom_kill_count
from harness.launcher import rank_entry, stack_dump
from harness.launcher.monitor import HangDetector, monitor_ranks
from harness.launcher.outcome import LaunchOutcome, classify_outcome
from harness.records import heartbeat
from harness.records.run_folder import RunFolder
from harness.util.text import one_line

MONITOR_SECONDS = 0.05  # between two looks of the elastic agent at its ranks

LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn")


@dataclass(frozen=True)
class StartMethod:
    """How rank processes come to be: multiprocessing's method and what its forkserver imports before it forks."""

    method: str
    preload: tuple[str, ...]


# A CPU rank is forked from a process that has imported what every rank needs, and has done nothing with it: no thread,
# no tensor. So a run of a sweep starts in a fraction of a second instead of several seconds of imports.
# A CUDA rank is forked from a bare interpreter, which is as clean as spawn: importing all that on a GPU machine may ask
# the driver for devices, after which a fork cannot use them. Unlike with spawn, the leash holds from the first moment.
FORKSERVER = StartMethod("forkserver", ("harness.launcher.parent_death",))

START_METHODS: Mapping[str, StartMethod] = {
    "cpu": StartMethod("forkserver", ("harness.launcher.parent_death", "harness.launcher.preload")),
    "cuda": FORKSERVER,
}


@dataclass(frozen=True)
class NodeInfo:
    """This machine's place among those of one run. Port 0, a free one, is for a single node."""

    count: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def threads_per_rank(local_world_size: int) -> int:
    """The cores this process may use, divided among the ranks of this machine."""
    return max(1, len(usable_cores()) // local_world_size)


def start_forkserver(device: str, start: StartMethod | None = None) -> None:
    """Starts what the ranks will be forked from, without waiting for its imports. Does nothing if it is there.

    It lives no longer than the thread that calls this (harness.launcher.parent_death): call it from the main thread.
    """
    start = start or START_METHODS[device]
    if start.method != "forkserver":
        return
    server: Any = multiprocessing.forkserver._forkserver  # one a process, and no public way to end it
    if server._preload_modules != list(start.preload):
        server._stop()
        multiprocessing.set_forkserver_preload(list(start.preload))
    with _environment(rank_environment(device, 1) | {"OPENBLAS_NUM_THREADS": "1"}):  # else numpy starts threads
        multiprocessing.forkserver.ensure_running()


def launch(
    entry: Callable[[str], None],
    run_dir: Path,
    world_size: int,
    *,
    device: str,
    timeout_seconds: float,
    hang_seconds: float = math.inf,
    on_tick: Callable[[], None] | None = None,
    nodes: NodeInfo | None = None,
    start: StartMethod | None = None,
) -> LaunchOutcome:
    """Runs `entry(str(run_dir))` in every rank of this node, with torchrun's environment; returns when all are dead.

    `entry` is a module's function. `on_tick` is called five times a second, from another thread; what it raises is
    raised here. Call it from the main thread: a first SIGINT, SIGTERM or SIGHUP ends the run as 'interrupted', a second
    raises KeyboardInterrupt. Logs go to `run_dir/logs`: rank_<r>.log, and launcher.log if the launcher complains. Ranks
    of which none says anything new (harness.pulse) for `hang_seconds` are ended; those, and ranks at their time limit,
    leave their stacks there too.
    """
    if entry.__module__ == "__main__":
        raise ValueError(f"{entry.__qualname__} is in __main__, which a rank cannot import: move it to a module")
    began = time.monotonic()
    RunFolder(run_dir).logs.mkdir(parents=True, exist_ok=True)
    nodes, start = nodes or NodeInfo(), start or START_METHODS[device]
    local_ranks = world_size // nodes.count
    ranks = range(nodes.rank * local_ranks, (nodes.rank + 1) * local_ranks)
    patience = HangDetector(lambda: tuple(heartbeat.read_heartbeat(run_dir, rank) for rank in ranks), hang_seconds)
    arguments = (entry.__module__, entry.__qualname__, run_dir, usable_cores())
    kills_before = oom_kill_count()
    died: Mapping[int, ProcessFailure] = {}
    trouble = ""
    with (
        _environment({}),  # the elastic launcher leaves a variable behind
        _log_elastic_to(RunFolder(run_dir).launcher_log),
        monitor_ranks(local_ranks, began + timeout_seconds, patience, on_tick) as watch,
    ):
        try:
            try:
                watch.arm()
                start_forkserver(device, start)
                store = _store() if nodes.count == 1 else None
                port = store.port if store else nodes.master_port
                config = _config(nodes, port, local_ranks, device, start, run_dir, timeout_seconds)
                elastic_launch(config, rank_entry.run_rank)(*arguments, watch.lifeline_read, watch.reports)
            finally:
                watch.armed = False
        except ChildFailedError as error:
            died = error.failures
        except SignalException:
            watch.stopped = watch.stopped or ("" if watch.failed_at() else "interrupted")
        except Exception as error:
            trouble = one_line(f"the ranks could not be run: {type(error).__name__}: {error}")
            with suppress(OSError), RunFolder(run_dir).launcher_log.open("a") as log:  # the disk may be full
                traceback.print_exc(file=log)
    stack_dump.remove_empty(run_dir, ranks)
    killed_by_kernel = oom_kill_count() > kills_before
    return classify_outcome(watch, died, trouble, run_dir, ranks.start, time.monotonic() - began, killed_by_kernel)


def _store(port: int = 0) -> TCPStore:
    """Where the ranks of a single node meet, at a free port. The agent opens that port too and shares this server.

    The socket is ours: torch remembers servers by port and, of a port it chose itself, keeps the dead one of an earlier
    run in place of the new. After a hundred runs or two the agent would find that, and the port taken.
    """
    listening = socket.create_server(("127.0.0.1", port))
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def _config(
    nodes: NodeInfo, port: int, local_ranks: int, device: str, start: StartMethod, run_dir: Path, timeout_seconds: float
) -> LaunchConfig:
    """Static: who takes part is known. torch's dynamic rendezvous would find that out in half a second a run."""
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=local_ranks,
        logs_specs=_RankLogs(rank_environment(device, local_ranks)),
        run_id=run_dir.name,  # the nodes of one run meet under one name
        rdzv_backend="static",
        rdzv_endpoint=f"{nodes.master_addr}:{port}",
        rdzv_configs={"rank": nodes.rank},
        rdzv_timeout=max(1, int(timeout_seconds)),  # no signal breaks into a store that waits for the other nodes
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method=start.method,
        signals_to_handle="SIGQUIT",  # the others are harness.watch's; it cannot be empty
    )


class _RankLogs(LogsSpecs):
    """Leaves the streams to harness.rank; used for its sight of every rank's environment before the start."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank_environment in envs.values():
            rank_environment.update(self._environment, TORCHELASTIC_ERROR_FILE="")
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""


def rank_environment(device: str, local_ranks: int) -> dict[str, str]:
    """What every rank of this machine finds in its environment, beside torchrun's variables."""
    scripts = sysconfig.get_path("scripts")  # DeepSpeed looks for ninja on PATH
    environment = {
        "OMP_NUM_THREADS": str(threads_per_rank(local_ranks)),
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
    }
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # as it is now, not when the process that forks ranks was started
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would choose mps on macOS
        # libgomp's threads spin 300000 times before they sleep: beside other work that takes the core they wait for.
        environment["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "5000")
    return environment


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """os.environ with these values; as it was, afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _log_elastic_to(target: Path) -> Iterator[None]:
    """The elastic launcher's warnings and tracebacks into a file, made when there is something to say."""
    file = logging.FileHandler(target, delay=True)
    file.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk is no reason to complain here
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.propagate, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.propagate, logger.handlers = False, [file]
    try:
        yield
    finally:
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers
        with suppress(OSError):
            file.close()
