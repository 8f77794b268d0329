"""A sweep as a command of its own: the kinds of its processes, and which of them are left after its end."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

MARK = "HARNESS_FAULTS_MARK"  # in the environment of a command and of all that it starts

TINY = ("train.seq_len=32", "train.steps=1", "train.warmup_steps=1", "tracking=none")

PATIENCE_SECONDS = 240.0  # with a whole sweep, on a busy machine


@dataclass(frozen=True)
class Command:
    """A running command in a session of its own, whose output goes to a file."""

    process: "subprocess.Popen[bytes]"
    mark: str
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Return the exit status; kill a process that takes longer, and raise TimeoutExpired."""
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def run_python(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run this interpreter in a folder, with these variables besides its own, and return its outcome."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=1800)


def start(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> Command:
    """Start `python -m harness -m name=sweep results_dir=FOLDER` in FOLDER, optionally through another program."""
    mark = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f".output.{mark}"
    command = [*before, sys.executable, "-m", "harness", "-m", "name=sweep", f"results_dir={folder}", *TINY, *arguments]
    variables = os.environ | {MARK: mark, "PYTHONPATH": str(ROOT)} | (environment or {})
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    return Command(process, mark, log)


def run_to_end(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run such a command to its end; return its exit status and its output."""
    command = start(folder, arguments, environment)
    return command.wait(), command.output()


def living(command: Command) -> list[psutil.Process]:
    """Return the processes of a command, without zombies, by its session or its mark, whichever they have kept."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_its = os.getsid(process.pid) == command.process.pid or process.environ().get(MARK) == command.mark
            if is_its and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def kind_of(process: psutil.Process, command: Command) -> str:
    """Return parent, forkserver, slot, rank, tracker, or other, such as a compiler or git.

    The parent's forkserver forks ranks or slots, and a slot's forkserver forks ranks: all show the same command line.
    """
    if process.pid == command.process.pid:
        return "parent"
    if "multiprocessing.resource_tracker" in " ".join(process.cmdline()):
        return "tracker"
    if "multiprocessing.forkserver" not in " ".join(process.cmdline()):
        return "other"
    above = [parent.pid for parent in process.parents()]
    depth = above.index(command.process.pid) if command.process.pid in above else -1
    makes_slots = any(word.startswith("sweep.parallel=") for word in command.process.args)  # type: ignore[union-attr]
    kinds = ("forkserver", "slot", "forkserver", "rank") if makes_slots else ("forkserver", "rank")
    return kinds[depth] if 0 <= depth < len(kinds) else "other"


def kill_one(command: Command, kind: str, chance: random.Random, number: int = signal.SIGKILL) -> bool:
    """Kill one process of that kind; return whether there was one."""
    processes = living(command)
    chance.shuffle(processes)
    for process in processes:
        with suppress(psutil.Error):
            if kind_of(process, command) == kind:
                process.send_signal(number)
                return True
    return False


def seconds_until_gone(command: Command, patience: float) -> tuple[float, list[str]]:
    """Return how long processes of a dead command live on, and those left after `patience`, which are killed."""
    started = time.monotonic()
    while (left := living(command)) and time.monotonic() - started < patience:
        time.sleep(0.02)
    for process in left:
        process.kill()
    return time.monotonic() - started, [str(process) for process in left]
