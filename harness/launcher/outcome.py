"""How a launch ended, from what the parent saw, what the elastic agent says and what the ranks logged."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from harness.launcher import stack_dump
from harness.launcher.monitor import RankMonitor
from harness.records import heartbeat
from harness.records.run_folder import RunFolder
from harness.util.text import one_line

TAIL_BYTES = 16_384

TAIL_LINES = 8

TAIL_CHARACTERS = 600

# Signals that no failure of a peer explains. An abort can be one: collectives abort when a connection breaks.
PRIMARY_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTERM")


@dataclass(frozen=True)
class RankFailure:
    rank: int
    exit_code: int  # negative: killed by that signal
    signal: str  # its name, '' if none
    error: str  # the exception in one line, '' where none was raised
    log_tail: str
    at: float  # time.time(), about


@dataclass(frozen=True)
class LaunchOutcome:
    status: str  # ok | oom | error | timeout | interrupted
    reason: str  # one line, '' when ok
    failures: tuple[RankFailure, ...]  # the one that came first is first; ranks killed in consequence are not here
    seconds: float


def classify_outcome(
    watch: RankMonitor,
    died: Mapping[int, ProcessFailure],
    trouble: str,
    run_dir: Path,
    first_rank: int,
    seconds: float,
    killed_by_kernel: bool = False,
) -> LaunchOutcome:
    """The outcome of a run whose ranks are all dead.

    `died` is what the agent reports, by global rank; `trouble` what kept it from running them; `first_rank` this
    node's first; `killed_by_kernel` whether the kernel killed for want of memory meanwhile.
    """
    failures = () if trouble or watch.stopped else _failures(watch, died, first_rank, run_dir)
    if watch.stopped in ("timeout", "hang"):
        late = [first_rank + rank for rank in range(len(watch.reports)) if rank not in watch.done]
        how = f"killed after {seconds:.1f} s, its time limit"
        if watch.stopped == "hang":
            how = f"killed after {watch.patience.seconds:g} s in which no rank got any further"
        return LaunchOutcome(
            "timeout", f"{how}; not done: rank {', '.join(map(str, late))}{_standing(run_dir, late)}", (), seconds
        )
    if watch.stopped:
        return LaunchOutcome(watch.stopped, f"stopped by a signal after {seconds:.1f} s", (), seconds)
    if trouble:
        return LaunchOutcome("error", trouble, (), seconds)
    if failures:
        starved = killed_by_kernel and failures[0].signal == "SIGKILL"
        return LaunchOutcome("oom" if starved else "error", _blame(failures, starved), failures, seconds)
    return LaunchOutcome("ok", "", (), seconds)


def _failures(
    watch: RankMonitor, died: Mapping[int, ProcessFailure], first_rank: int, run_dir: Path
) -> tuple[RankFailure, ...]:
    """Every rank that failed by itself, the one to blame first: a crash, else the earliest."""
    codes = {rank - first_rank: failure.exitcode for rank, failure in died.items()}
    if watch.left:  # the agent overlooks an exit with 0, and has then seen only what was killed for it
        codes = {rank: codes.get(rank, 0) for rank in watch.left}
    found: list[tuple[bool, float, RankFailure]] = []
    for local in codes.keys() | watch.raised.keys():
        rank, raised = first_rank + local, watch.raised.get(local)
        code = raised.exit_code if raised else codes[local]
        name = signal.Signals(-code).name if code < 0 else ""
        moment = raised.moment if raised else watch.gone.get(local, time.monotonic())
        at = time.time() - (time.monotonic() - moment)
        failure = RankFailure(rank, code, name, raised.error if raised else "", log_tail(RunFolder(run_dir).log(rank)), at)
        found.append((name not in PRIMARY_SIGNALS, moment, failure))
    return tuple(failure for *_, failure in sorted(found, key=lambda entry: entry[:2]))


def _standing(run_dir: Path, late: Sequence[int]) -> str:
    """Where the rank is that is furthest behind, and what it last wrote."""
    if not late:
        return ""
    silent = heartbeat.Heartbeat("before its first word", -1, None, None)
    beats = {rank: heartbeat.read_heartbeat(run_dir, rank) or silent for rank in late}
    rank = min(late, key=lambda rank: beats[rank].step)
    doing = beats[rank].phase if beats[rank] is silent else f"{beats[rank].phase}, step {beats[rank].step}"
    place = stack_dump.main_thread_location(run_dir, rank)
    return (
        f"; rank {rank} in {doing}{place and ', stands in '}{place}; its log {_ends(log_tail(RunFolder(run_dir).log(rank)))}"
    )


def _blame(failures: tuple[RankFailure, ...], starved: bool) -> str:
    """One line on the rank that failed first."""
    first = failures[0]
    if first.signal:
        how = f"was killed by {first.signal}"
        if starved:
            how = "was killed by the kernel, which had no memory left"
    elif first.error:
        how = f"raised {first.error}"
    else:
        how = f"exited with code {first.exit_code} before it was done"
    others = ", ".join(str(failure.rank) for failure in failures[1:])
    also = f" (then failed: rank {others})" if others else ""
    return f"rank {first.rank} {how}{also}; its log {_ends(first.log_tail)}"


def _ends(tail: str) -> str:
    return f"ends: {tail}" if tail else "is empty"


def log_tail(path: Path) -> str:
    """The last lines of a log in one line, '' if there is none; without the stacks that a crash leaves behind them."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").partition("Fatal Python error: ")[0].splitlines()
    kept = [one_line(line) for line in lines if line.strip()][-TAIL_LINES:]
    return " | ".join(kept)[-TAIL_CHARACTERS:]
