"""The parent's side of tracking: it hands runs to the tracking process and does not wait for it during runs."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from harness.config.command import TrackingConfig
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.tracking.base import Answer, Message, Task
from harness.util.text import UserError

CLOSE_SECONDS = 10.0  # the longest that close() waits for everything handed over to be tracked

QUIET_SECONDS = 10.0  # after a run's start the tracking process is idle: it would disturb short runs

POLL_SECONDS = 0.01


class TrackingClient:
    """The connection of one command to its tracking process.

    The process is started with the first run that is to be tracked, and ends with the command. `results` maps every
    folder handed over to None, or to the reason why its data did not arrive where the configuration says.
    """

    def __init__(
        self, log: Callable[[str], None], *, upload_seconds: float = 0.0, quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        """Remember the settings and start nothing.

        If `upload_seconds` is above 0, the server has that long to answer, every record is sent even if it was sent
        before, and what the server does not accept is not written offline.
        """
        self.log = log
        self.upload_seconds = upload_seconds
        self.quiet_seconds = quiet_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Connection[Message, Answer] | None = None  # None before the start, and once the process is gone
        self.unsent: queue.SimpleQueue[Message] = queue.SimpleQueue()  # a thread sends them, as the process may hang
        self.pending: dict[str, Path] = {}  # folders without an answer, each with its comparison's folder
        self.results: dict[str, str | None] = {}
        self.is_sync_hint_logged = False  # whether the user already knows the command that sends the data later
        self.lock = threading.Lock()  # runs are started in the thread that monitors them

    def hand_over(self, task: Task, tracking: GroupValues, folder: Path, config: ConfigValues | None = None) -> None:
        """Announce a run that has started, a run that has its record, or the table of a whole comparison's folder.

        A run's folder exists; one that has its record need not have started. `config` is that of a run that starts.
        """
        try:
            name = from_dict(TrackingConfig, tracking, "tracking").name
        except UserError:  # the row was refused because of these very keys
            return
        if name == "none":
            return
        comparison, folder = folder if task == "log_table" else folder.parent, folder.resolve()
        with self.lock:
            if self.process is None and not self._start():
                return
            if task != "start_run":
                self.pending[str(folder)] = comparison
            self.unsent.put(
                {
                    "do": task,
                    "tracking": tracking,
                    "folder": str(folder),
                    "upload": self.upload_seconds,
                    "hint": sync_hint(comparison),
                    "config": config or {},
                }
            )
            self._exchange()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait at most `seconds` for all answers, end the process, and log how to send what is not tracked by then."""
        if self.process is None:
            return
        self.unsent.put({"do": "close"})
        self.wait(seconds, until_gone=True)
        self._kill()
        missing = Counter(str(comparison) for comparison in self.pending.values() if not self.is_sync_hint_logged)
        for comparison, count in sorted(missing.items()):
            runs = f"{count} run{'s were' if count > 1 else ' was'}"
            self.log(f"tracking: {runs} not tracked within {seconds:g} s; {sync_hint(comparison)}")

    def wait(self, seconds: float, until_gone: bool = False) -> None:
        """Wait at most `seconds` until everything is answered or the process is gone, or for the latter alone."""
        ends_at = time.monotonic() + seconds
        while (self.pending or until_gone) and self.channel is not None and time.monotonic() < ends_at:
            with self.lock:
                self._exchange(POLL_SECONDS)

    def _start(self) -> bool:
        """Start the process and return whether that worked.

        It gets a session of its own, because signals of this terminal, such as Ctrl-C, are not meant for it, and a
        folder for temporary files, which trackers leave behind.
        """
        channel, process_end = Pipe()
        fd = process_end.fileno()
        command = [sys.executable, "-m", "harness.tracking.process", str(fd), str(self.quiet_seconds)]
        null = subprocess.DEVNULL
        with process_end:
            try:
                self.scratch = tempfile.TemporaryDirectory(prefix="hs", ignore_cleanup_errors=True)
                self.process = subprocess.Popen(
                    [*command, self.scratch.name],
                    env=os.environ | {"TMPDIR": self.scratch.name},
                    stdin=null,
                    stdout=null,
                    stderr=null,
                    pass_fds=[fd],
                    start_new_session=True,
                )
            except OSError as error:  # out of memory, of processes or of disk: the run goes on without tracking
                reason = f"{error.strerror}: {error.filename}"
                self.log(f"tracking: its process cannot be started ({reason}); nothing is tracked")
                return False
        self.channel = channel
        threading.Thread(target=send_all, args=(channel, self.unsent), daemon=True).start()
        return True

    def _exchange(self, wait_seconds: float = 0.0) -> None:
        """Read what has arrived; if nothing has, wait for it so long."""
        try:
            while self.channel is not None and self.channel.poll(wait_seconds):
                message, wait_seconds = self.channel.recv(), 0.0
                if "done" in message:
                    self.pending.pop(message["done"], None)
                    self.results[message["done"]] = message["problem"]
                else:
                    self.is_sync_hint_logged |= message.get("has_hint", False)
                    self.log(message["log"])
        except (OSError, EOFError):  # the process is gone
            self.channel = None

    def _kill(self) -> None:
        """Kill the process and everything that the tracker has started, whatever they are doing."""
        assert self.process is not None
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for process in children:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.scratch.cleanup()


def send_all(channel: "Connection[Message, Answer]", unsent: "queue.SimpleQueue[Message]") -> None:
    """Send what is handed over as soon as the process takes it, until the process is gone."""
    with suppress(OSError):
        while True:
            channel.send(unsent.get())


def sync_hint(comparison: Path | str) -> str:
    """Return the end of a message: the command that sends to the tracker what it does not have."""
    return f"`harness sync {comparison}` sends all of it"
