"""The tracking process: it passes what the parent hands over to trackers, and watches running runs.

TrackingClient starts it with the number of its end of a pipe, with the number of seconds for which a run that has
started is left undisturbed, and with a folder for temporary files. It shares nothing else with the parent: a tracker
that hangs or dies here costs the runs nothing.
"""

import dataclasses
import importlib
import os
import queue
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from harness.config.command import TrackingConfig
from harness.config.from_dict import from_dict
from harness.records.store import read_all, read_record
from harness.tracking import payload
from harness.tracking.base import Answer, Message, TrackedRun, Tracker, TrackerUnavailableError, tracked_id
from harness.util.redact import redacted
from harness.util.text import one_line

ANSWER_SECONDS = 5.0  # the server's time to answer, or all that follows is written offline; `harness sync` sets its own

LIVE_SECONDS = 1.0  # between two updates of the running runs

WAIT_SECONDS = 0.2  # for the parent's next message

ORPHAN_SECONDS = 3.0  # the trackers' time to complete their files after the parent has died

NICENESS = 19  # the lowest priority: measured runs come first


@dataclass
class StartedRun:
    """A run that the parent has announced and that has no record yet."""

    message: Message
    received_at: float  # time.monotonic()
    live: tuple[TrackedRun, TrackingConfig] | None = None  # once its tracker knows it


class TrackingProcess:
    """The trackers of one command, by the configuration that named them, and its running runs."""

    def __init__(self, channel: "Connection[Answer, Message]", quiet_seconds: float) -> None:
        """Take the pipe to the parent, and the seconds for which a started run is left undisturbed."""
        self.channel = channel
        self.quiet_seconds = quiet_seconds
        self.trackers: dict[TrackingConfig, Tracker] = {}
        self.failures: dict[TrackingConfig, str] = {}  # why a configuration with mode=online is offline from then on
        self.started: dict[str, StartedRun] = {}  # by the run's folder

    def serve(self, inbox: "queue.SimpleQueue[Message]") -> None:
        """Handle messages until the parent closes or is gone, and everything handed over before that is tracked."""
        waiting: list[Message] = []
        is_closing = False
        next_update = 0.0
        while not is_closing or waiting:
            if not is_closing:
                with suppress(queue.Empty):
                    message = inbox.get(timeout=0 if waiting and not self.is_quiet() else WAIT_SECONDS)
                    is_closing = message["do"] == "close"
                    if message["do"] == "start_run":
                        before = self.started.get(message["folder"])
                        live = before.live if before else None  # a run that starts once more stays the tracker's
                        self.started[message["folder"]] = StartedRun(message, time.monotonic(), live)
                    elif not is_closing:
                        self.started.pop(message["folder"], None)
                        waiting.append(message)
            if waiting and (is_closing or not self.is_quiet()):
                message = waiting.pop(0)
                self.send({"done": message["folder"], "problem": self.handle(message)})
            elif time.monotonic() >= next_update:
                next_update = time.monotonic() + LIVE_SECONDS
                self.update_live_runs()
        for tracker in self.trackers.values():
            tracker.close()

    def is_quiet(self) -> bool:
        """Return whether a run has started so recently that it may be over soon and must not be disturbed."""
        now = time.monotonic()
        return any(now - started.received_at < self.quiet_seconds for started in self.started.values())

    def handle(self, message: Message) -> str | None:
        """Track what a message says and return None, or why it is not where the configuration says.

        After a tracker has failed, what follows is written offline, except for `harness sync`.
        """
        config = from_dict(TrackingConfig, redacted(message["tracking"]), "tracking")
        try:
            if config not in self.failures:
                try:
                    self.track(config, message)
                    return None
                except TrackerUnavailableError as error:
                    self.failures[config] = str(error)
                    self.trackers.pop(config, None)  # not closed, which could take long; it ends with this process
                    if not message["upload"]:
                        line = f"tracking: {error}; runs are kept on disk; {message['hint']}"
                        self.send({"log": line, "has_hint": True})
            if config.mode == "online" and not message["upload"]:
                with suppress(TrackerUnavailableError):  # the reason is known
                    self.track(config, message)
            return self.failures[config]
        except Exception as error:  # not the network's fault: log it and go on with the next run
            problem = one_line(f"{type(error).__name__}: {error}")
            self.send({"log": f"tracking: {Path(message['folder']).name} could not be tracked ({problem})"})
            return problem

    def track(self, config: TrackingConfig, message: Message) -> None:
        """Pass one message to its tracker, which the first message connects, offline if it has failed before."""
        used = dataclasses.replace(config, mode="offline") if config in self.failures else config
        if config not in self.trackers:
            module = importlib.import_module(f"harness.tracking.trackers.{config.name}")
            self.trackers[config] = module.connect(used, message["upload"] or ANSWER_SECONDS)
        folder, tracker = Path(message["folder"]), self.trackers[config]
        if message["do"] != "start_run":
            self.deliver(tracker, used, message)
            return
        state = payload.SyncState(tracked_id(folder.name, str(time.time_ns())))
        payload.write_sync_state(folder, used.name, state)
        run = payload.started_run(folder, state.id, message["config"], used)
        tracker.start_run(run)
        self.started[message["folder"]].live = run, config

    def deliver(self, tracker: Tracker, used: TrackingConfig, message: Message) -> None:
        """Give a run's record or a comparison's table to the tracker, unless it has that and is not to get it again."""
        folder, is_online = Path(message["folder"]), used.mode == "online"
        if message["do"] == "finish_run":
            record = read_record(folder)
            content_key, state = payload.record_key(record), payload.record_sync_state(folder, used.name, record)
        else:
            records = read_all(folder).records
            content_key, state = payload.rows_key(records), payload.table_sync_state(folder, used.name)
        if state.has(content_key, is_online) and not message["upload"]:
            return
        if message["do"] == "finish_run":
            run = payload.finished_run(folder, state.id, record, used)
            tracker.finish_run(run, redacted(record.row), payload.step_values(folder))
        else:
            run = TrackedRun(state.id, f"{folder.name} summary", folder.name, folder, tags=used.tags)
            tracker.log_table(run, *payload.table_rows(records))
        payload.write_sync_state(folder, used.name, state.received(content_key, is_online))

    def update_live_runs(self) -> None:
        """Log the heartbeats of running runs; the tracker learns of short runs only when they have ended."""
        for folder, started in list(self.started.items()):
            seconds = time.monotonic() - started.received_at
            if seconds < self.quiet_seconds:
                continue
            if started.live is None:
                self.handle(started.message)
            if started.live is None:
                del self.started[folder]
                continue
            run, config = started.live
            with suppress(Exception):  # a tracker that has failed is reported when the run has ended
                if figures := payload.live_figures(Path(folder)):
                    self.trackers[config].log_live(run, {"seconds": seconds} | figures)

    def send(self, message: Answer) -> None:
        """Send a message to the parent: the answer about a folder, or a line for the user."""
        with suppress(OSError):  # the parent is gone
            self.channel.send(redacted(message))


def listen(channel: "Connection[Answer, Message]", inbox: "queue.SimpleQueue[Message]") -> None:
    """Put the parent's messages into the inbox, and end this process soon after the parent is gone.

    It runs in a thread of its own, so that the parent's end is noticed even while a tracker hangs.
    """
    with suppress(OSError, EOFError):  # the pipe is reset if the parent died before it read an answer
        while True:
            inbox.put(channel.recv())
    inbox.put({"do": "close"})
    time.sleep(ORPHAN_SECONDS)
    exit_now(1)


def exit_now(status: int) -> None:
    """End this process at once, and every process that a tracker has started, and remove their temporary files."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    os._exit(status)


def main() -> None:
    """Serve the parent whose pipe, quiet seconds and folder for temporary files are on the command line."""
    os.nice(NICENESS)
    channel: Connection[Answer, Message] = Connection(int(sys.argv[1]))
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(channel, inbox), daemon=True).start()
    TrackingProcess(channel, float(sys.argv[2])).serve(inbox)
    exit_now(0)


if __name__ == "__main__":
    main()
