"""The outcome of a launch, judged by what the parent observed, what the agent reports and what the ranks logged."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from harness.launcher.monitor import RankMonitor
from harness.launcher.rank_entry import main_thread_location
from harness.records.rank_report import LaunchStatus
from harness.records.run_folder import RunFolder
from harness.util.text import one_line

TAIL_BYTES = 16_384  # the part at the end of a log that is searched for its last lines

TAIL_LINES = 8

TAIL_CHARACTERS = 600

# Signals that a peer's failure cannot cause, unlike SIGABRT: collectives abort when a connection breaks.
PRIMARY_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTERM")


# Signals that neither the launcher nor the code of a rank sends.
OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP")


@dataclass(frozen=True)
class RankFailure:
    """One rank that failed by itself."""

    rank: int
    exit_code: int  # negative if killed by that signal
    signal: str  # its name, '' if no signal killed it
    error: str  # the exception in one line, '' if none was raised
    log_tail: str
    at: float  # by time.time(), approximately


@dataclass(frozen=True)
class LaunchOutcome:
    """The end of a launch: its status, and why it failed."""

    status: LaunchStatus
    reason: str  # one line, '' when ok
    failures: tuple[RankFailure, ...]  # the cause first; without ranks that were killed in consequence
    seconds: float
    from_outside: bool = False  # whether a signal that nobody here sent, or the loss of a node, ended it


def classify_outcome(
    monitor: RankMonitor,
    exits: Mapping[int, ProcessFailure],
    launch_error: str | None,
    run_dir: Path,
    first_rank: int,
    seconds: float,
    oom_killed: bool = False,
) -> LaunchOutcome:
    """Return the outcome of a run whose ranks are all dead.

    `exits` is what the agent reports, by global rank; `launch_error` is why it could not run the ranks; `first_rank` is
    this node's first global rank; `oom_killed` is whether the kernel killed a process meanwhile because memory ran out.
    """
    failures = () if launch_error or monitor.stop_reason else _failures(monitor, exits, first_rank, run_dir)
    if monitor.stop_reason in ("timeout", "hang"):
        unfinished = [first_rank + rank for rank in range(len(monitor.reports)) if rank not in monitor.done]
        cause = f"killed at its time limit, after {seconds:.1f} s"
        if monitor.stop_reason == "hang":
            cause = f"killed after {monitor.hang_detector.seconds:g} s without progress of any rank"
        reason = f"{cause}; unfinished: rank {', '.join(map(str, unfinished))}{_where_ranks_hang(run_dir, unfinished)}"
        return LaunchOutcome("timeout", reason, (), seconds)
    if monitor.stop_reason == "interrupted":
        reason = f"stopped by a signal after {seconds:.1f} s: the same command runs it again"
        return LaunchOutcome("interrupted", reason, (), seconds)
    if launch_error:
        return LaunchOutcome("error", launch_error, (), seconds)
    if failures:
        out_of_memory = oom_killed and failures[0].signal == "SIGKILL"
        reason = _first_failure_text(failures, out_of_memory)
        from_outside = failures[0].signal in OUTSIDE_SIGNALS
        return LaunchOutcome("oom" if out_of_memory else "error", reason, failures, seconds, from_outside)
    return LaunchOutcome("ok", "", (), seconds)


def _failures(
    monitor: RankMonitor, exits: Mapping[int, ProcessFailure], first_rank: int, run_dir: Path
) -> tuple[RankFailure, ...]:
    """Return every rank that failed by itself. The first is the cause: one that crashed, or else the earliest."""
    codes = {rank - first_rank: failure.exitcode for rank, failure in exits.items()}
    if monitor.silently_exited:  # the agent ignores an exit with 0, and reports only ranks killed in consequence
        codes = {rank: codes.get(rank, 0) for rank in monitor.silently_exited}
    failures: list[RankFailure] = []
    clock_offset = time.time() - time.monotonic()
    for local in codes.keys() | monitor.raised.keys():
        rank, raised = first_rank + local, monitor.raised.get(local)
        code = raised.exit_code if raised else codes[local]
        signal_name = signal.Signals(-code).name if code < 0 else ""
        moment = raised.moment if raised else monitor.exited_at.get(local, time.monotonic())
        error, tail = raised.error if raised else "", log_tail(RunFolder(run_dir).log(rank))
        failures.append(RankFailure(rank, code, signal_name, error, tail, moment + clock_offset))
    return tuple(sorted(failures, key=lambda failure: (failure.signal not in PRIMARY_SIGNALS, failure.at)))


def _where_ranks_hang(run_dir: Path, unfinished: Sequence[int]) -> str:
    """Return the location of the unfinished rank that is furthest behind, and its last lines of log."""
    if not unfinished:
        return ""
    beats = {rank: RunFolder(run_dir).read_heartbeat(rank) for rank in unfinished}
    steps = {rank: -1 if beat is None else beat.step for rank, beat in beats.items()}
    rank = min(unfinished, key=lambda rank: steps[rank])
    beat, location = beats[rank], main_thread_location(run_dir, rank)
    phase = "had sent no heartbeat" if beat is None else f"was in {beat.phase}, step {beat.step}"
    function = "" if location is None else f", in {location}"
    return f"; rank {rank} {phase}{function}; its log {_log_end(log_tail(RunFolder(run_dir).log(rank)))}"


def _first_failure_text(failures: tuple[RankFailure, ...], out_of_memory: bool) -> str:
    """Return one line on the rank that failed first."""
    first = failures[0]
    if first.signal:
        cause = f"was killed by {first.signal}"
        if out_of_memory:
            cause = "was killed by the kernel because memory ran out"
    elif first.error:
        cause = f"raised {first.error}"
    else:
        cause = f"exited with code {first.exit_code} before it had finished"
    others = ", ".join(str(failure.rank) for failure in failures[1:])
    also = f" (then failed: rank {others})" if others else ""
    return f"rank {first.rank} {cause}{also}; its log {_log_end(first.log_tail)}"


def _log_end(tail: str) -> str:
    return f"ends: {tail}" if tail else "is empty"


def log_tail(path: Path) -> str:
    """Return the last lines of a log as one line, '' if there are none, without the stack traces of a crash."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").partition("Fatal Python error: ")[0].splitlines()
    last_lines = [one_line(line) for line in lines if line.strip()][-TAIL_LINES:]
    return " | ".join(last_lines)[-TAIL_CHARACTERS:]
