"""The parent's end of tracking: hands runs over to a process of its own and never waits for it while runs are made."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from harness.config.from_dict import from_dict
from harness.config.schema import TrackingConfig
from harness.util.errors import UserError

CLOSE_SECONDS = 10.0  # in all, for what was handed over to be told, at a command's end

QUIET_SECONDS = 10.0  # from a run's begin, in which nothing is done beside it: short runs are told when they are over

SHORTEST_SECONDS = 0.01


class TrackingClient:
    """One a command. The process is started with the first run that is to be tracked, and dies with this one.

    `answers` has, of each folder handed over whole, None or why it is not where it was asked to be.
    """

    def __init__(
        self, log: Callable[[str], None], *, upload_seconds: float = 0.0, quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        self.say = log
        # Above 0 a server has so long to answer, and all is sent, whatever was before, with nothing kept instead.
        self.upload_seconds = upload_seconds
        self.quiet_seconds = quiet_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None  # None: not there yet, or there no longer
        self.unsent = b""  # what the socket had no room for
        self.unread = b""
        self.pending: dict[str, Path] = {}  # folders without an answer, and their comparison
        self.results: dict[str, str | None] = {}
        self.is_mended = False  # whether the user knows already what sends it later
        self.lock = threading.Lock()  # a run starts in the thread that watches it

    def begin(self, tracking: dict[str, Any], run_dir: Path, config: dict[str, Any]) -> None:
        """A run whose folder is there has started."""
        self._put("begin", tracking, run_dir, run_dir.parent, config=config)

    def end(self, tracking: dict[str, Any], run_dir: Path) -> None:
        """Its record, or that of a run which never began, is in its folder."""
        self._put("end", tracking, run_dir, run_dir.parent)

    def table(self, tracking: dict[str, Any], folder: Path) -> None:
        """A sweep is over: its table is that of the whole folder."""
        self._put("table", tracking, folder, folder)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Waits for so long at most; what is not told by then is said, with the command that does it later."""
        if self.process is None:
            return
        ends_at = time.monotonic() + seconds
        with self.lock:
            self._send({"do": "close"})
        while self.channel is not None and time.monotonic() < ends_at:
            with self.lock:
                self._exchange(ends_at)
        self._kill()
        for comparison in sorted({str(path) for path in self.pending.values()} if not self.is_mended else ()):
            count = sum(str(path) == comparison for path in self.pending.values())
            runs = f"{count} run{'s were' if count > 1 else ' was'}"
            self.say(f"tracking: {runs} not taken; {sync_hint(comparison)}")

    def wait(self, seconds: float) -> None:
        """Until everything is answered, the process is gone, or so long at most."""
        ends_at = time.monotonic() + seconds
        while self.pending and self.channel is not None and time.monotonic() < ends_at:
            with self.lock:
                self._exchange(ends_at)

    def _put(self, do: str, tracking: dict[str, Any], folder: Path, comparison: Path, **more: Any) -> None:
        try:
            asked: TrackingConfig = from_dict(TrackingConfig, tracking, "tracking")
        except UserError:  # of a row that is refused for it
            return
        if asked.name == "none":
            return
        folder = folder.resolve()
        with self.lock:
            if self.process is None and not self._start():
                return
            if do != "begin":
                self.pending[str(folder)] = comparison
            message = {"do": do, "tracking": tracking, "folder": str(folder), "upload": self.upload_seconds}
            self._send(message | {"mend": sync_hint(comparison)} | more)
            self._exchange(0.0)

    def _start(self) -> bool:
        """In a session of its own: what the terminal sends to this one, Ctrl-C above all, is not meant for it."""
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        command = [sys.executable, "-m", "harness.tracking.process", str(theirs.fileno()), str(self.quiet_seconds)]
        nothing = subprocess.DEVNULL
        passed = [theirs.fileno()]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=passed, start_new_session=True
                )
            except OSError as error:  # no memory, no process: the run goes on
                self.say(f"tracking: its process cannot be started ({error.strerror})")
        return self.process is not None

    def _send(self, message: dict[str, Any]) -> None:
        self.unsent += json.dumps(message, default=str).encode() + b"\n"

    def _exchange(self, ends_at: float) -> None:
        """Writes what there is room for and reads what is there; returns soon, at once if that time is past."""
        if self.channel is None:
            return
        try:
            if self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone
            self.channel = None
            return
        try:
            read = self.channel.recv(65536)
        except BlockingIOError:
            if time.monotonic() < ends_at:
                time.sleep(SHORTEST_SECONDS)
            return
        except OSError:
            read = b""
        if not read:
            self.channel = None
        *lines, self.unread = (self.unread + read).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, message: dict[str, Any]) -> None:
        if "done" in message:
            self.pending.pop(message["done"], None)
            self.results[message["done"]] = message["why"]
        else:
            self.is_mended = self.is_mended or bool(message.get("mended"))
            self.say(message["say"])

    def _kill(self) -> None:
        """Whatever it is doing, and what the tracker has started."""
        assert self.process is not None
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            family = []
        self.process.kill()
        for process in family:
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait()


def sync_hint(comparison: Path | str) -> str:
    return f"`python -m harness.tracking {comparison}` sends all of it"
