"""The interface of a tracker, and how a tracker is found by its name.

A tracker is one module in harness/tracking/trackers with one function,

    connect(config, timeout_seconds) -> Tracker

which imports its library and raises TrackerUnavailableError if the tracker cannot be used, and one file in
conf/tracking. Where it names its library as LIBRARY, no run starts without that. It runs in a process of its own
(harness.tracking.process), which the parent's TrackingClient starts. It may be slow, hang or die there: everything
that it received can be sent again from the records (`harness sync`).
"""

import hashlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from harness.config.from_dict import ConfigValues, GroupValues, one_of
from harness.util.text import UserError

Scalar = str | int | float | bool

Values = Mapping[str, Any]


class TrackerUnavailableError(Exception):
    """The tracker did not accept the data, for the reason in the message, which is one line.

    No data are lost: they still lie in the run's folder.
    """


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it: one run of the harness, or the summary of a comparison."""

    id: str  # 16 hexadecimal digits, the same for the same record, so that sending it twice does not duplicate it
    name: str
    group: str  # the name of the comparison
    folder: Path  # where the tracker may keep its own files, in a folder with the tracker's name
    config: Values = field(default_factory=dict)
    tags: tuple[str, ...] = ()


class Tracker(Protocol):
    """The five methods of a tracker.

    Each may raise TrackerUnavailableError. Calls for several runs may be interleaved.
    """

    def start_run(self, run: TrackedRun) -> None:
        """Register a run that has started."""

    def log_live(self, run: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        """Log the state of a started run: `seconds` since its start, and what its ranks last reported."""

    def finish_run(self, run: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        """Log a finished run's row and steps, whether or not start_run was called.

        Return only when the server has all of it, or the tracker's local file is complete.
        """

    def log_table(self, run: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        """Log all rows of a comparison as one run. Return only when it is complete, as finish_run does."""

    def close(self) -> None:
        """Mark every run that was started and not finished as failed; no other call follows."""


def tracker_names() -> list[str]:
    """Return the names of all trackers without importing any of them."""
    from harness.tracking import trackers

    return sorted(module.name for module in pkgutil.iter_modules(trackers.__path__))


def check_tracker(name: str) -> None:
    """Raise UserError if there is no such tracker, or its library is not installed."""
    one_of("none", *tracker_names())(name, "tracking")
    module = importlib.import_module(f"harness.tracking.trackers.{name}") if name != "none" else None
    library = getattr(module, "LIBRARY", None)
    if library and importlib.util.find_spec(library) is None:
        raise UserError(f"tracking={name} needs the {library} library: pip install 'training-harness[{name}]'")


def numbers(values: Values) -> dict[str, float]:
    """Return the values that are numbers, as trackers draw them; true and false are none."""
    kinds = (int, float)
    return {key: value for key, value in values.items() if isinstance(value, kinds) and not isinstance(value, bool)}


def tracked_id(run_id: str, moment: str) -> str:
    """Return the tracker's id for the run `run_id` that started at `moment`."""
    return hashlib.sha256(f"{run_id} {moment}".encode()).hexdigest()[:16]


Task = Literal["start_run", "finish_run", "log_table"]  # the method of a tracker that a message leads to


class Message(TypedDict, total=False):
    """A message of the command. One that closes the connection has no other key than `do`."""

    do: Task | Literal["close"]
    tracking: GroupValues
    folder: str  # of the run, or for a table of the comparison
    upload: float  # the seconds that the server has to answer; 0: what it does not accept is written offline
    hint: str  # the end of a message to the user: the command that sends the data later
    config: ConfigValues  # of a run that has started


class Answer(TypedDict, total=False):
    """A message of the tracking process: a folder that is done, with its problem, or a line for the user."""

    done: str
    problem: str | None  # why the data are not where the configuration says
    log: str
    has_hint: bool  # whether the line names the command that sends the data later
