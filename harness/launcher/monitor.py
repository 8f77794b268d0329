"""The parent's monitor of running ranks: their messages, the time limit, signals, and a forced end if necessary."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Literal

from torch.distributed.elastic.multiprocessing.api import SignalException

from harness.launcher.rank_entry import Raised, request_dumps
from harness.launcher.signals import HANDLED, is_ignored

TICK_SECONDS = 0.2

MIN_LISTEN_SECONDS = 0.01  # the shortest wait for ranks' messages, even if the next tick is due

GRACE_SECONDS = 2.0  # the time from a rank's failure until its peers are killed, unless the elastic agent did so

PROGRESS_SECONDS = 0.5  # the time between two readings of the ranks' progress

DEATH_SECONDS = 5.0  # time for killed ranks to exit

RESTORED = (*HANDLED, signal.SIGQUIT)  # the elastic agent handles SIGQUIT


class HangDetector:
    """A detector of runs in which no rank has made progress for `seconds`.

    `read_progress` returns a snapshot of all ranks; any change of it is progress.
    """

    def __init__(self, read_progress: Callable[[], Hashable], seconds: float) -> None:
        self.read_progress, self.seconds = read_progress, seconds
        self.last_progress: Hashable = None
        self.checked_at = self.progressed_at = time.monotonic()

    def is_hanging(self, now: float) -> bool:
        """Return whether no rank has made progress for too long."""
        if now - self.checked_at >= PROGRESS_SECONDS:
            self.checked_at = now
            progress = self.read_progress()
            if progress != self.last_progress:
                self.last_progress, self.progressed_at = progress, now
        return now - self.progressed_at >= self.seconds


@dataclass
class RankMonitor:
    """The state of one run's ranks, by local rank.

    The monitoring thread writes it, and so do the signal handlers in the main thread.
    """

    lifeline_read: Connection  # the ranks' end of a pipe: they exit when the other end closes or the parent dies
    lifeline_write: Connection
    reports: list[Connection]  # the ranks' ends of their message pipes, one for each rank
    parent_ends: dict[Connection, int]  # the parent's ends, with the local ranks that are still connected
    deadline: float  # by time.monotonic()
    hang_detector: HangDetector
    stop_reason: Literal["timeout", "hang", "interrupted"] | None = None
    interruptible: bool = False  # whether a signal may interrupt the main thread: true while the agent runs
    signals: int = 0  # the number of signals received from outside
    interrupted_at: float = 0.0
    interrupted_by_us: bool = False
    is_ending: bool = False  # whether the agent has returned
    pids: dict[int, int] = field(default_factory=dict)  # the process ids of the ranks that have started
    done: set[int] = field(default_factory=set)
    raised: dict[int, Raised] = field(default_factory=dict)
    exited_at: dict[int, float] = field(default_factory=dict)  # when a rank's connection was seen to be closed
    silently_exited: tuple[int, ...] = ()  # ranks that exited with 0 without a message, which the agent ignores
    tick_error: Exception | None = None

    def arm(self) -> None:
        """Let signals interrupt the main thread from now on; raise at once if one was received before."""
        self.interruptible = True
        if self.stop_reason:
            raise SignalException("before the start", signal.SIGKILL)

    def failed_at(self) -> float | None:
        """Return when the first rank failed, or None if none is known to have failed."""
        moments = [r.moment for r in self.raised.values()]
        moments += [moment for rank, moment in self.exited_at.items() if rank not in self.done]
        return min(moments, default=None)


@contextmanager
def monitor_ranks(
    local_ranks: int, deadline: float, hang_detector: HangDetector, on_tick: Callable[[], None] | None
) -> Iterator[RankMonitor]:
    """Monitor ranks until the block ends; then every rank is dead and the signal handlers are restored."""
    lifeline_read, lifeline_write = multiprocessing.Pipe(duplex=False)
    pairs = [multiprocessing.Pipe(duplex=False) for _ in range(local_ranks)]
    parent_ends = {parent_end: rank for rank, (parent_end, _) in enumerate(pairs)}
    rank_ends = [rank_end for _, rank_end in pairs]
    monitor = RankMonitor(lifeline_read, lifeline_write, rank_ends, parent_ends, deadline, hang_detector)
    other_children = set(multiprocessing.active_children())
    finished = threading.Event()
    thread = threading.Thread(target=_monitor_loop, args=(monitor, on_tick, finished), daemon=True)
    handlers = {number: signal.getsignal(number) for number in RESTORED}
    for number in HANDLED:
        if not is_ignored(number):
            signal.signal(number, lambda number, frame: _on_signal(monitor, number, frame))
    try:
        thread.start()
        yield monitor
    finally:
        try:
            _end(monitor, other_children)
        finally:
            finished.set()
            thread.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for connection in (lifeline_read, *(end for pair in pairs for end in pair)):
                connection.close()
    if monitor.tick_error is not None:
        raise monitor.tick_error


def _on_signal(monitor: RankMonitor, number: int, _: FrameType | None) -> None:
    """Stop the run on the first signal from outside, and raise KeyboardInterrupt on a second SIGINT."""
    if monitor.interrupted_by_us:
        monitor.interrupted_by_us = False
    elif monitor.signals and number != signal.SIGINT:  # a closed terminal sends several SIGHUP
        return
    else:
        monitor.signals += 1
        monitor.stop_reason = monitor.stop_reason or "interrupted"
    if monitor.signals > 1:
        raise KeyboardInterrupt
    if monitor.interruptible:
        raise SignalException(f"{signal.Signals(number).name}", signal.SIGKILL)  # the agent sends SIGKILL to the ranks


def _monitor_loop(monitor: RankMonitor, on_tick: Callable[[], None] | None, finished: threading.Event) -> None:
    next_tick = time.monotonic()
    while not finished.is_set():
        _listen(monitor, finished, max(MIN_LISTEN_SECONDS, next_tick - time.monotonic()))
        now = time.monotonic()
        _enforce(monitor, now)
        if now < next_tick or not monitor.interruptible:  # the first tick stays due until the agent runs
            continue
        next_tick = now + TICK_SECONDS
        if on_tick is not None and monitor.tick_error is None:
            try:
                on_tick()
            except Exception as error:
                monitor.tick_error = error


def _listen(monitor: RankMonitor, finished: threading.Event, seconds: float) -> None:
    """Receive the ranks' messages for `seconds`. A rank whose pipe is closed has exited."""
    if monitor.is_ending or len(monitor.pids) == len(monitor.reports):
        for rank_end in monitor.reports:  # each rank has inherited its end, so a pipe now closes with its rank
            rank_end.close()
    if not monitor.parent_ends:
        finished.wait(seconds)
        return
    for connection in wait(list(monitor.parent_ends), seconds):
        assert isinstance(connection, Connection)
        rank = monitor.parent_ends[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            monitor.exited_at[rank] = time.monotonic()
            del monitor.parent_ends[connection]
            continue
        if isinstance(message, Raised):
            monitor.raised[rank] = message
        elif message is None:
            monitor.done.add(rank)
        else:
            monitor.pids[rank] = message


def _enforce(monitor: RankMonitor, now: float) -> None:
    """End the run at its time limit, when it hangs, or when the agent overlooks that a rank has exited."""
    if not monitor.interruptible or now - monitor.interrupted_at < GRACE_SECONDS:
        return
    failed_at = monitor.failed_at()
    reason: Literal["timeout", "hang"] | None
    reason = "timeout" if now >= monitor.deadline else "hang" if monitor.hang_detector.is_hanging(now) else None
    if reason:
        if not monitor.stop_reason:
            request_dumps(pid for rank, pid in monitor.pids.items() if rank not in monitor.exited_at)
        else:  # the main thread did not react, because it is blocked or SIGTERM is: the ranks end without it
            monitor.lifeline_write.close()
        monitor.stop_reason = monitor.stop_reason or reason
        _interrupt_main_thread(monitor, now)
    elif failed_at is not None and now - failed_at > GRACE_SECONDS:
        if not monitor.lifeline_write.closed:  # first kill the peers, which may survive the agent's SIGTERM
            monitor.silently_exited = tuple(
                r for r in monitor.exited_at if r not in monitor.done and r not in monitor.raised
            )
            monitor.lifeline_write.close()
        elif now - failed_at > 2 * GRACE_SECONDS:
            _interrupt_main_thread(monitor, now)


def _interrupt_main_thread(monitor: RankMonitor, now: float) -> None:
    """Interrupt whatever the main thread waits for."""
    monitor.interrupted_at, monitor.interrupted_by_us = now, True
    identity = threading.main_thread().ident
    assert identity is not None
    signal.pthread_kill(identity, signal.SIGTERM)


def _end(monitor: RankMonitor, other_children: set[multiprocessing.process.BaseProcess]) -> None:
    """Kill the ranks that the agent left: by SIGKILL, or by the lifeline if a process was just being started."""
    monitor.interruptible = False
    for process in multiprocessing.active_children():
        if process not in other_children:
            process.kill()
            process.join(DEATH_SECONDS)
    monitor.lifeline_write.close()
    monitor.is_ending = True
    deadline = time.monotonic() + DEATH_SECONDS
    while monitor.parent_ends and time.monotonic() < deadline:
        time.sleep(0.005)
