"""The limits of a command, after which it starts no further run: stop_after=8h,20runs,3failures."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness.util.errors import UserError

SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

COUNTS = ("runs", "failures")

FAILURES = ("error", "timeout")  # the statuses of failed runs


@dataclass
class StopAfter:
    """The limits of a command, None where there is none, and how much of them is used up."""

    seconds: float | None = None
    runs: int | None = None
    failures: int | None = None
    started_at: float = 0.0  # time.monotonic()
    started: int = 0  # runs
    failed: int = 0  # runs

    def exceeded_limit(self) -> str:
        """Return a phrase such as "stop_after=20runs is reached" if a limit is reached; '' while none is."""
        if self.seconds is not None and time.monotonic() - self.started_at >= self.seconds:
            return f"stop_after={self.seconds:g}s is reached"
        if self.runs is not None and self.started >= self.runs:
            return f"stop_after={self.runs}runs is reached"
        if self.failures is not None and self.failed >= self.failures:
            return f"stop_after={self.failures}failures is reached"
        return ""


def parse_stop_after(entries: Sequence[str | int | float]) -> StopAfter:
    """Return the limits of stop_after's entries: seconds, or a number with s, m, h, d, runs or failures.

    Raises UserError for any other entry.
    """
    limits = StopAfter(started_at=time.monotonic())
    for entry in entries:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(entry))
        number, unit = match.groups() if match else ("", "?")
        if unit in SECONDS:
            limits.seconds = float(number) * SECONDS[unit]
        elif unit in COUNTS and number.isdecimal():
            setattr(limits, unit, int(number))
        else:
            raise UserError(f"stop_after={entry} is not a limit: choose a time such as 90m or 8h, 20runs, or 3failures")
    return limits
