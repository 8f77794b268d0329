"""The parent's eyes and hands on running ranks: what each reported, the time limit, signals, and their certain end."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from harness.launcher import stack_dump
from harness.launcher.rank_entry import Done, Raised, Started

TICK_SECONDS = 0.2

SHORTEST_SECONDS = 0.01  # of a look at the ranks, while there is no tick to wait for

GRACE_SECONDS = 2.0  # from a rank's failure to the end of its peers, should the elastic agent not manage by then

LOOK_SECONDS = 0.5  # between two looks at how far ranks are

DEATH_SECONDS = 5.0  # for killed ranks to be gone

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TOUCHED = (*HANDLED, signal.SIGQUIT)  # SIGQUIT stays with the elastic agent


class HangDetector:
    """With ranks that get no further. `standing` tells where they are: any change of it is progress."""

    def __init__(self, standing: Callable[[], Hashable], seconds: float) -> None:
        self.standing, self.seconds = standing, seconds
        self.seen: Hashable = None
        self.checked_at = self.moved_at = time.monotonic()

    def is_over(self, now: float) -> bool:
        if now - self.checked_at >= LOOK_SECONDS:
            self.checked_at = now
            seen = self.standing()
            if seen != self.seen:
                self.seen, self.moved_at = seen, now
        return now - self.moved_at >= self.seconds


@dataclass
class RankMonitor:
    """One run's ranks, by local rank. The watching thread writes it, and the signal handlers in the main thread."""

    lifeline_read: Connection  # for the ranks: they die when its other end, `hold`, closes or the parent dies
    lifeline_write: Connection
    reports: list[Connection]  # for the ranks, one each
    parent_ends: dict[Connection, int]  # the other ends of those still open
    ends_at: float  # time.monotonic()
    patience: HangDetector
    stopped: str = ""  # timeout | hang | interrupted
    armed: bool = False  # whether a signal may break into what the main thread does: while the agent runs
    signals: int = 0  # received from outside
    poked_at: float = 0.0
    poked: bool = False
    is_ending: bool = False  # the agent has returned
    pids: dict[int, int] = field(default_factory=dict)  # of ranks that have started
    done: set[int] = field(default_factory=set)
    raised: dict[int, Raised] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)  # when a rank that had started was seen to be dead
    left: tuple[int, ...] = ()  # ranks that went without a word and without the agent's notice: they exited with 0
    tick_error: Exception | None = None

    def arm(self) -> None:
        """From here on a signal breaks in; one that came before does so now."""
        self.armed = True
        if self.stopped:
            raise SignalException("before the start", signal.SIGKILL)

    def failed_at(self) -> float | None:
        """When the first rank failed, as far as seen."""
        moments = [r.moment for r in self.raised.values()]
        moments += [moment for rank, moment in self.gone.items() if rank not in self.done]
        return min(moments, default=None)


@contextmanager
def monitor_ranks(
    local_ranks: int, ends_at: float, patience: HangDetector, on_tick: Callable[[], None] | None
) -> Iterator[RankMonitor]:
    """Watches until the block ends; then every rank is dead, and signal handlers are what they were."""
    lifeline, hold = multiprocessing.Pipe(duplex=False)
    pairs = [multiprocessing.Pipe(duplex=False) for _ in range(local_ranks)]
    ears = {ear: rank for rank, (ear, _) in enumerate(pairs)}
    watch = RankMonitor(lifeline, hold, [mouth for _, mouth in pairs], ears, ends_at, patience)
    already = set(multiprocessing.active_children())
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(watch, on_tick, over), daemon=True)
    handlers = {number: signal.getsignal(number) for number in TOUCHED}
    for number in HANDLED:
        if handlers[number] is not signal.SIG_IGN:  # nohup's and a background job's wish
            signal.signal(number, lambda number, frame: _on_signal(watch, number, frame))
    try:
        thread.start()
        yield watch
    finally:
        try:
            _end(watch, already)
        finally:
            over.set()
            thread.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for connection in (lifeline, *(end for pair in pairs for end in pair)):
                connection.close()
    if watch.tick_error is not None:
        raise watch.tick_error


def _on_signal(watch: RankMonitor, number: int, _: FrameType | None) -> None:
    """The first breaks off the run, the second whatever is being done."""
    if watch.poked:
        watch.poked = False
    else:
        watch.signals += 1
        watch.stopped = watch.stopped or "interrupted"
    if watch.signals > 1:
        raise KeyboardInterrupt
    if watch.armed:
        raise SignalException(f"{signal.Signals(number).name}", signal.SIGKILL)  # what the agent sends on to the ranks


def _watch(watch: RankMonitor, on_tick: Callable[[], None] | None, over: threading.Event) -> None:
    next_tick = time.monotonic()
    while not over.is_set():
        _listen(watch, over, max(SHORTEST_SECONDS, next_tick - time.monotonic()))
        now = time.monotonic()
        _enforce(watch, now)
        if now < next_tick or not watch.armed:  # the first tick is not lost, however short the run
            continue
        next_tick = now + TICK_SECONDS
        if on_tick is not None and watch.tick_error is None:
            try:
                on_tick()
            except Exception as error:
                watch.tick_error = error


def _listen(watch: RankMonitor, over: threading.Event, seconds: float) -> None:
    """What the ranks say within that time; the end of a rank's pipe is the end of the rank."""
    if watch.is_ending or len(watch.pids) == len(watch.reports):
        for mouth in watch.reports:  # every rank that will ever have one has it: now a pipe ends with its rank
            mouth.close()
    if not watch.parent_ends:
        over.wait(seconds)
        return
    for ear in wait(list(watch.parent_ends), seconds):
        assert isinstance(ear, Connection)
        rank = watch.parent_ends[ear]
        try:
            message = ear.recv()
        except (EOFError, OSError):
            watch.gone[rank] = time.monotonic()
            del watch.parent_ends[ear]
            continue
        if isinstance(message, Started):
            watch.pids[rank] = message.pid
        elif isinstance(message, Done):
            watch.done.add(rank)
        elif isinstance(message, Raised):
            watch.raised[rank] = message


def _enforce(watch: RankMonitor, now: float) -> None:
    """Ends the run at its time limit, or when the agent overlooks that a rank is gone."""
    if not watch.armed or now - watch.poked_at < GRACE_SECONDS:
        return
    failed_at = watch.failed_at()
    late = "timeout" if now >= watch.ends_at else "hang" if watch.patience.is_over(now) else ""
    if late:
        if not watch.stopped:
            stack_dump.request_dumps(pid for rank, pid in watch.pids.items() if rank not in watch.gone)
        watch.stopped = watch.stopped or late
        _poke(watch, now)
    elif failed_at is not None and now - failed_at > GRACE_SECONDS:
        if not watch.lifeline_write.closed:  # first the peers, which may have a way to survive the agent's SIGTERM
            watch.left = tuple(r for r in watch.gone if r not in watch.done and r not in watch.raised)
            watch.lifeline_write.close()
        elif now - failed_at > 2 * GRACE_SECONDS:
            _poke(watch, now)


def _poke(watch: RankMonitor, now: float) -> None:
    """Makes the main thread leave whatever it waits for."""
    watch.poked_at, watch.poked = now, True
    identity = threading.main_thread().ident
    assert identity is not None
    signal.pthread_kill(identity, signal.SIGTERM)


def _end(watch: RankMonitor, already: set[multiprocessing.process.BaseProcess]) -> None:
    """Kills what the agent left: by SIGKILL if it is known, by the lifeline if it was only just being started."""
    watch.armed = False
    for process in multiprocessing.active_children():
        if process not in already:
            process.kill()
            process.join(DEATH_SECONDS)
    watch.lifeline_write.close()
    watch.is_ending = True
    patience = time.monotonic() + DEATH_SECONDS
    while watch.parent_ends and time.monotonic() < patience:
        time.sleep(0.005)
