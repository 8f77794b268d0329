"""Entry points of ranks that fail on purpose in the middle of training: one is killed, and one hangs."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from harness.launcher.rank_entry import worker_entry
from harness.records.heartbeat import read_heartbeat

FAULTY_STEPS = 200  # timed steps of a run with a fault, more than any rank takes before the fault

_POLL_SECONDS = 0.002

_FIRST_STEP = 2  # the fault happens once the rank has reached this step


def killed_rank(run_dir: str) -> None:
    """Run a rank; the last rank of the world is killed by SIGKILL while it trains."""
    _fail_in_training(run_dir, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hanging_rank(run_dir: str) -> None:
    """Run a rank; the main thread of the last rank of the world sleeps from some moment of its training on."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.signal(signal.SIGALRM, lambda *_: time.sleep(24 * 3600))
    _fail_in_training(run_dir, lambda: signal.pthread_kill(main_thread, signal.SIGALRM))


def _fail_in_training(run_dir: str, fail: Callable[[], None]) -> None:
    """Run a rank, and call `fail` in another thread once the last rank of the world has reached _FIRST_STEP."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == world_size - 1:
        threading.Thread(target=_wait_and_fail, args=(Path(run_dir), rank, fail), daemon=True).start()
    worker_entry(run_dir)


def _wait_and_fail(run_dir: Path, rank: int, fail: Callable[[], None]) -> None:
    while (beat := read_heartbeat(run_dir, rank)) is None or beat.step < _FIRST_STEP:
        time.sleep(_POLL_SECONDS)
    fail()
