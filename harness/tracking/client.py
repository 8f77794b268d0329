"""The parent's side of tracking: it hands runs to the tracking process and does not wait for it during runs."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from harness.config.command import TrackingConfig
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.tracking.base import Answer, Message, Task
from harness.util.errors import UserError

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

    def start_run(self, tracking: GroupValues, run_dir: Path, config: ConfigValues) -> None:
        """Announce that a run has started; its folder exists."""
        self._hand_over("start_run", tracking, run_dir, run_dir.parent, config)

    def finish_run(self, tracking: GroupValues, run_dir: Path) -> None:
        """Announce that a run's record is in its folder, also if the run never started."""
        self._hand_over("finish_run", tracking, run_dir, run_dir.parent)

    def log_table(self, tracking: GroupValues, folder: Path) -> None:
        """Announce that a sweep is over, so that the table of the whole folder is logged."""
        self._hand_over("log_table", tracking, folder, folder)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait at most `seconds` for all answers, end the process, and log how to send what is not tracked by then."""
        if self.process is None:
            return
        ends_at = time.monotonic() + seconds
        self.unsent.put({"do": "close"})
        while self.channel is not None and time.monotonic() < ends_at:
            with self.lock:
                self._exchange(ends_at)
        self._kill()
        for comparison in sorted({str(path) for path in self.pending.values()} if not self.is_sync_hint_logged else ()):
            count = sum(str(path) == comparison for path in self.pending.values())
            runs = f"{count} run{'s were' if count > 1 else ' was'}"
            self.log(f"tracking: {runs} not tracked within {seconds:g} s; {sync_hint(comparison)}")

    def wait(self, seconds: float) -> None:
        """Wait until everything is answered or the process is gone, at most `seconds`."""
        ends_at = time.monotonic() + seconds
        while self.pending and self.channel is not None and time.monotonic() < ends_at:
            with self.lock:
                self._exchange(ends_at)

    def _hand_over(
        self,
        task: Task,
        tracking: GroupValues,
        folder: Path,
        comparison: Path,
        config_values: ConfigValues | None = None,
    ) -> None:
        try:
            config = from_dict(TrackingConfig, tracking, "tracking")
        except UserError:  # the row was refused because of these very keys
            return
        if config.name == "none":
            return
        folder = folder.resolve()
        with self.lock:
            if self.process is None and not self._start():
                return
            if task != "start_run":
                self.pending[str(folder)] = comparison
            message: Message = {
                "do": task,
                "tracking": tracking,
                "folder": str(folder),
                "upload": self.upload_seconds,
                "hint": sync_hint(comparison),
            }
            if config_values is not None:
                message["config"] = config_values
            self.unsent.put(message)
            self._exchange(0.0)

    def _start(self) -> bool:
        """Start the process and return whether that worked.

        It gets a session of its own, because signals of this terminal, such as Ctrl-C, are not meant for it.
        """
        channel, process_end = Pipe()
        fd = process_end.fileno()
        command = [sys.executable, "-m", "harness.tracking.process", str(fd), str(self.quiet_seconds)]
        null = subprocess.DEVNULL
        with process_end:
            try:
                self.process = subprocess.Popen(
                    command, stdin=null, stdout=null, stderr=null, pass_fds=[fd], start_new_session=True
                )
            except OSError as error:  # out of memory or of processes: the run goes on without tracking
                self.log(f"tracking: its process cannot be started ({error.strerror}); nothing is tracked")
                return False
        self.channel = channel
        threading.Thread(target=send_all, args=(channel, self.unsent), daemon=True).start()
        return True

    def _exchange(self, ends_at: float) -> None:
        """Read what has arrived; if nothing has, wait for it POLL_SECONDS, unless the time `ends_at` is past."""
        try:
            while self.channel is not None and self.channel.poll(POLL_SECONDS if time.monotonic() < ends_at else 0):
                self._receive(self.channel.recv())
                ends_at = 0.0
        except (OSError, EOFError):  # the process is gone
            self.channel = None

    def _receive(self, message: Answer) -> None:
        if "done" in message:
            self.pending.pop(message["done"], None)
            self.results[message["done"]] = message["problem"]
        else:
            self.is_sync_hint_logged = self.is_sync_hint_logged or bool(message.get("has_hint"))
            self.log(message["log"])

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


def send_all(channel: "Connection[Message, Answer]", unsent: "queue.SimpleQueue[Message]") -> None:
    """Send what is handed over as soon as the process takes it, until the process is gone."""
    with suppress(OSError):
        while True:
            channel.send(unsent.get())


def sync_hint(comparison: Path | str) -> str:
    """Return the end of a message: the command that sends to the tracker what it does not have."""
    return f"`harness sync {comparison}` sends all of it"
