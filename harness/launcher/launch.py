"""The launch of a run's ranks through torch's elastic launcher, until all have ended."""

import errno
import logging
import math
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness.config.schema import Device
from harness.hardware.machine import usable_cores
from harness.launcher import rank_entry
from harness.launcher.forkserver import rank_environment, start_forkserver, temporary_environment
from harness.launcher.limits import CGROUPS, PROC, control_groups, lines_of
from harness.launcher.monitor import HangDetector, monitor_ranks
from harness.launcher.outcome import LaunchOutcome, classify_outcome
from harness.records.run_folder import RunFolder
from harness.util.redact import redact_file
from harness.util.text import one_line

MONITOR_SECONDS = 0.05  # the time between two checks of the elastic agent on its ranks

OWN_STORE_SECONDS = 60.0  # for a server in the same process to answer

_ELASTIC_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn")


@dataclass(frozen=True)
class NodeInfo:
    """This node's rank among the nodes of one run. Port 0 means any free port, for a single node."""

    count: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def launch(
    entry: Callable[[str], None],
    run_dir: Path,
    world_size: int,
    *,
    device: Device,
    timeout_seconds: float,
    hang_seconds: float = math.inf,
    on_tick: Callable[[], None] | None = None,
    nodes: NodeInfo | None = None,
    preload: Sequence[str] | None = None,
    libraries: Sequence[str] = (),
) -> LaunchOutcome:
    """Run `entry(str(run_dir))` in every rank of this node, with torchrun's environment, and return when all are dead.

    `entry` is a module-level function, and `libraries` are those of LIBRARIES that its ranks use. `on_tick` is called
    five times a second from another thread, and its exceptions are raised here. Call this from the main thread: a first
    SIGINT, SIGTERM or SIGHUP ends the run as 'interrupted', a second raises KeyboardInterrupt. Logs go to
    `run_dir/logs`: rank_<r>.log, and launcher.log if the launcher logs a warning. If no rank's heartbeat changes for
    `hang_seconds`, all ranks are killed; these, and ranks at their time limit, leave their stack traces in the same
    folder.
    """
    if entry.__module__ == "__main__":
        raise ValueError(f"{entry.__qualname__} is in __main__, which a rank cannot import: move it to a module")
    folder, started = RunFolder(run_dir), time.monotonic()
    folder.logs.mkdir(parents=True, exist_ok=True)
    nodes = nodes or NodeInfo()
    local_ranks = world_size // nodes.count
    ranks = range(nodes.rank * local_ranks, (nodes.rank + 1) * local_ranks)
    hang_detector = HangDetector(lambda: tuple(map(folder.read_heartbeat, ranks)), hang_seconds)
    arguments = (entry.__module__, entry.__qualname__, run_dir, usable_cores())
    kills_before = oom_kill_count()
    exits: Mapping[int, ProcessFailure] = {}
    launch_error = None
    with (
        temporary_environment({}),  # the elastic launcher leaves a variable behind
        _log_elastic_to(folder.launcher_log),
        monitor_ranks(local_ranks, started + timeout_seconds, hang_detector, on_tick) as monitor,
    ):
        try:
            try:
                monitor.arm()
                start_forkserver(device, preload, libraries)
                store = _store() if nodes.count == 1 else None
                port = store.port if store else nodes.master_port
                config = _config(nodes, port, local_ranks, device, run_dir, timeout_seconds)
                elastic_launch(config, rank_entry.run_rank)(*arguments, monitor.lifeline_read, monitor.reports)
            finally:
                monitor.interruptible = False
        except ChildFailedError as error:
            exits = error.failures
        except SignalException:
            monitor.stop_reason = monitor.stop_reason or (None if monitor.failed_at() else "interrupted")
        except Exception as error:
            launch_error = one_line(f"the ranks could not be run: {type(error).__name__}: {error}{place_of(error)}")
            with suppress(OSError), folder.launcher_log.open("a") as log:  # the disk may be full
                traceback.print_exc(file=log)
    rank_entry.remove_empty(run_dir, ranks)
    for path in (folder.launcher_log, *map(folder.log, ranks)):
        redact_file(path)
    oom_killed = oom_kill_count() > kills_before
    return classify_outcome(monitor, exits, launch_error, run_dir, ranks.start, time.monotonic() - started, oom_killed)


def place_of(error: Exception) -> str:
    """Return where there is no room for what names no file, the semaphores of processes; '' for other errors."""
    full_or_missing = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT)
    is_semaphore = isinstance(error, OSError) and not error.filename and error.errno in full_or_missing
    return " for a semaphore in /dev/shm: free space there; a container gets more with --shm-size=1g" * is_semaphore


def _store(port: int = 0) -> TCPStore:
    """Return the rendezvous store of a single node's ranks. The agent opens the same port and shares this server.

    The socket is created here because torch caches servers by port: for a port that it chose itself it keeps the dead
    server of an earlier run instead of the new one. After one or two hundred runs the agent would get that dead server,
    and the port would be taken.
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
    nodes: NodeInfo,
    port: int,
    local_ranks: int,
    device: Device,
    run_dir: Path,
    timeout_seconds: float,
) -> LaunchConfig:
    """Return a configuration with a static rendezvous, which saves the half second that torch's dynamic one takes."""
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=local_ranks,
        logs_specs=_RankLogs(rank_environment(device, local_ranks)),
        run_id=run_dir.name,  # the same on all nodes of a run
        rdzv_backend="static",
        rdzv_endpoint=f"{nodes.master_addr}:{port}",
        rdzv_configs={"rank": nodes.rank},
        # No signal interrupts a store that waits, on a single node only for this process's own server.
        rdzv_timeout=max(1, int(min(timeout_seconds, OWN_STORE_SECONDS if nodes.count == 1 else math.inf))),
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method="forkserver",
        signals_to_handle="SIGQUIT",  # harness.launcher.monitor handles the others; this cannot be empty
    )


class _RankLogs(LogsSpecs):
    """A hook that sets every rank's environment before its start; harness.launcher.rank_entry redirects the output."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            environment.update(self._environment, TORCHELASTIC_ERROR_FILE="")
        no_files = dict.fromkeys(envs, "")
        return LogsDest(stdouts=no_files, stderrs=no_files, error_files=no_files)

    @property
    def root_log_dir(self) -> str:
        return ""


@contextmanager
def _log_elastic_to(target: Path) -> Iterator[None]:
    """Write the elastic launcher's warnings and tracebacks to a file, which is created with the first of them."""
    file = logging.FileHandler(target, delay=True)
    file.handleError = lambda record: None  # type: ignore[method-assign]  # do not complain about a full disk here
    loggers = [logging.getLogger(name) for name in _ELASTIC_LOGGERS]
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


def oom_kill_count(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how many processes of this control group, else of this machine, the kernel killed because memory ran out.

    It is 0 where the kernel does not report it (not Linux). If the count grew while a rank died of SIGKILL, the kernel
    killed that rank.
    """
    return next(_counts(proc, cgroups), 0)


def _counts(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the known counts, the most specific first: control groups version 2, version 1, the whole machine."""
    groups = control_groups("memory", proc, cgroups)
    for path in (
        *(group / name for group in groups for name in ("memory.events", "memory.oom_control")),
        proc / "vmstat",
    ):
        for line in lines_of(path):
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                yield int(value)
