"""Experiment tracking: what a tracker must offer, and how one is found.

A tracker is one module of harness/tracking/trackers, found by its name, with one function
    connect(config, seconds) -> Tracker     imports its library; raises Unreachable where it cannot be had
and one file in conf/tracking. It runs in a process of its own (harness.tracking.child), fed by the parent's Feed, and
may take its time, hang or die there: what it was given can be told again from the records (harness.tracking.upload).
"""

import hashlib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from harness.config.schema import TrackingConfig


Scalar = str | int | float | bool

Values = Mapping[str, Any]


class TrackerUnavailable(Exception):
    """The tracker's server did not take what it was given; one line. The data are where they were."""


@dataclass(frozen=True)
class TrackedRun:
    """One run of a tracker: a run of ours, or a comparison's summary."""

    id: str  # 16 hexadecimal digits; the same for the same record, so that what is sent twice is there once
    name: str
    group: str  # the comparison
    folder: Path  # where the tracker may keep files of its own, in a folder with its name
    config: Values = field(default_factory=dict)
    tags: tuple[str, ...] = ()


class Tracker(Protocol):
    """Every call may raise Unreachable, and may come for several runs in turn."""

    def start_run(self, subject: TrackedRun) -> None:
        """A run has started."""
        ...

    def log_live(self, subject: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        """How a run that has begun stands: `seconds` since then, and what its ranks say of themselves."""
        ...

    def finish_run(self, subject: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        """A run's row and its steps, `begin` called or not. Returns when the server has it, or the file is whole."""
        ...

    def log_table(self, subject: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        """The rows of a whole comparison, as a run of its own."""
        ...

    def close(self) -> None:
        """No more will come; runs that have not ended have failed."""
        ...


def tracker_names() -> list[str]:
    """The trackers there are; none is imported."""
    from harness.tracking import trackers

    return sorted(module.name for module in pkgutil.iter_modules(trackers.__path__))


def connect(config: "TrackingConfig", seconds: float) -> Tracker:
    """The tracker of that name, whose library is imported only now; a server has so long for an answer.

    Raises Unreachable.
    """
    made: Tracker = importlib.import_module(f"harness.tracking.trackers.{config.name}").connect(config, seconds)
    return made


def tracked_id(run_id: str, moment: str) -> str:
    """The tracker's name for a run of ours that started at that moment."""
    return hashlib.sha256(f"{run_id} {moment}".encode()).hexdigest()[:16]
