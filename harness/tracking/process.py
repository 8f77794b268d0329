"""The process a tracker runs in: it takes what the parent hands over, one after another, and looks at live runs itself.

Started by harness.tracking.feed with the number of a socket, on which either side writes a line of JSON a message, and
the seconds in which a run that began is left alone. It shares nothing else with the parent: whatever hangs or dies here
costs a run nothing.
"""

import dataclasses
import json
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from harness.config.from_dict import from_dict
from harness.config.schema import TrackingConfig
from harness.records.store import read_all, read_record
from harness.tracking import payload, sync_state
from harness.tracking.base import TrackedRun, Tracker, TrackerUnavailable, connect, tracked_id
from harness.util.redact import redacted
from harness.util.text import one_line

ANSWER_SECONDS = 5.0  # of a server, after which what follows is kept offline; an upload says itself

LIVE_SECONDS = 1.0  # between two looks at the runs that go on

WAIT_SECONDS = 0.2  # for the parent's next word

ORPHAN_SECONDS = 3.0  # for files to be made whole after the parent died

NICENESS = 19  # what is measured goes first

Message = dict[str, Any]


class Live(NamedTuple):
    subject: TrackedRun
    asked: TrackingConfig


class TrackingProcess:
    """Trackers by the configuration that asked for them, and the runs that go on."""

    def __init__(self, channel: socket.socket, quiet_seconds: float) -> None:
        self.channel = channel
        self.quiet_seconds = quiet_seconds
        self.trackers: dict[TrackingConfig, Tracker] = {}
        self.failures: dict[TrackingConfig, str] = {}  # why what was asked for online is offline, or nothing, since
        self.begun: dict[str, tuple[Message, float]] = {}  # by their folders, with the moment we heard of it
        self.live: dict[str, Live] = {}  # those of them that the tracker knows

    def serve(self, inbox: "queue.SimpleQueue[Message]") -> None:
        """Until the parent says it is over, or is gone; all that was handed over before is told first."""
        waiting: list[Message] = []
        is_over = False
        next_look = 0.0
        while not is_over or waiting:
            if not is_over:
                with suppress(queue.Empty):
                    message = inbox.get(timeout=0 if waiting and not self.is_quiet() else WAIT_SECONDS)
                    is_over = message["do"] == "close"
                    if message["do"] == "begin":
                        self.begun[message["folder"]] = message, time.monotonic()
                    elif not is_over:
                        self.begun.pop(message["folder"], None)
                        waiting.append(message)
            if waiting and (is_over or not self.is_quiet()):
                message = waiting.pop(0)
                self.tell(done=message["folder"], why=self.handle(message))
            elif time.monotonic() >= next_look:
                next_look = time.monotonic() + LIVE_SECONDS
                self.look()
        for tracker in self.trackers.values():
            tracker.close()

    def is_quiet(self) -> bool:
        """Whether a run has begun so recently that it may be over soon: it is not to be disturbed."""
        return any(time.monotonic() - since < self.quiet_seconds for _, since in self.begun.values())

    def handle(self, message: Message) -> str | None:
        """None, or why it is not where it was asked to be."""
        asked: TrackingConfig = from_dict(TrackingConfig, redacted(message["tracking"]), "tracking")
        try:
            if asked not in self.failures:
                try:
                    self.act(asked, message)
                    return None
                except TrackerUnavailable as error:
                    self.failures[asked] = str(error)
                    self.trackers.pop(asked, None)  # its process ends with this one: to close it could take long
                    if not message["upload"]:
                        self.tell(say=f"tracking: {error}; runs are kept on disk; {message['mend']}", mended=True)
            if asked.mode == "online" and not message["upload"]:
                self.act(asked, message)
            return self.failures[asked]
        except Exception as error:  # no network's: said, and no reason to stop
            why = one_line(f"{type(error).__name__}: {error}")
            self.tell(say=f"tracking: {Path(message['folder']).name} could not be tracked, {why}")
            return why

    def act(self, asked: TrackingConfig, message: Message) -> None:
        used = dataclasses.replace(asked, mode="offline") if asked in self.failures else asked
        if asked not in self.trackers:
            self.trackers[asked] = connect(used, message["upload"] or ANSWER_SECONDS)
        folder, tracker = Path(message["folder"]), self.trackers[asked]
        if message["do"] == "begin":
            had = sync_state.SyncState(tracked_id(folder.name, str(time.time_ns())))
            sync_state.write_sync_state(folder, used.name, had)
            subject = payload.started_run(folder, had.id, message["config"], used)
            tracker.start_run(subject)
            self.live[message["folder"]] = Live(subject, asked)
        elif message["do"] == "end":
            self.live.pop(message["folder"], None)
            self.end(tracker, used, folder, bool(message["upload"]))
        else:
            self.table(tracker, used, folder, bool(message["upload"]))

    def end(self, tracker: Tracker, used: TrackingConfig, run_dir: Path, again: bool) -> None:
        record = read_record(run_dir)
        had = sync_state.state_of(run_dir, used.name, record)
        if had.what is not None and (had.sent_at or used.mode == "offline") and not again:
            return  # a record that was not made anew
        subject = payload.finished_run(run_dir, had.id, record, used)
        tracker.finish_run(subject, redacted(record["row"]), payload.step_values(run_dir))
        sync_state.write_sync_state(
            run_dir, used.name, sync_state.mark_synced(had, sync_state.record_key(record), used.mode == "online")
        )

    def table(self, tracker: Tracker, used: TrackingConfig, folder: Path, again: bool) -> None:
        found = read_all(folder).records
        had = sync_state.state_of_table(folder, used.name)
        if had.what == sync_state.rows_key(found) and (had.sent_at or used.mode == "offline") and not again:
            return
        subject = TrackedRun(had.id, f"{folder.name} summary", folder.name, folder, tags=used.tags)
        tracker.log_table(subject, *payload.table_rows(found))
        sync_state.write_sync_state(
            folder, used.name, sync_state.mark_synced(had, sync_state.rows_key(found), used.mode == "online")
        )

    def look(self) -> None:
        """What the ranks of runs that go on say of themselves now; of short ones the tracker hears at their end."""
        for folder, (message, since) in list(self.begun.items()):
            seconds = time.monotonic() - since
            if seconds < self.quiet_seconds:
                continue
            if folder not in self.live:
                self.handle(message)
            if folder not in self.live:
                del self.begun[folder]
                continue
            subject, asked = self.live[folder]
            with suppress(Exception):  # the run's end will say it
                if figures := payload.live_figures(Path(folder)):
                    self.trackers[asked].log_live(subject, {"seconds": seconds} | figures)

    def tell(self, **message: Any) -> None:
        """To the parent, which says it or keeps it."""
        with suppress(OSError):  # a parent that is gone
            self.channel.sendall(json.dumps(redacted(message)).encode() + b"\n")


def listen(channel: socket.socket, inbox: "queue.SimpleQueue[Message]") -> None:
    """In a thread of its own, so that the parent's end is noticed whatever the tracker is doing."""
    with channel.makefile("rb") as lines:
        for line in lines:
            inbox.put(json.loads(line))
    inbox.put({"do": "close"})
    time.sleep(ORPHAN_SECONDS)
    end(1)


def end(status: int) -> None:
    """At once, with whatever processes the tracker has started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os._exit(status)


def main() -> None:
    os.nice(NICENESS)
    channel = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(channel, inbox), daemon=True).start()
    TrackingProcess(channel, float(sys.argv[2])).serve(inbox)
    end(0)


if __name__ == "__main__":
    main()
