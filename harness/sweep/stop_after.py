"""What a command may take, after which it begins no further run: stop_after=8h,20runs,3failures."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness.util.errors import UserError

SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

COUNTS = ("runs", "failures")

FAILURES = ("error", "timeout")


@dataclass
class StopAfter:
    """Limits, None where there is none, and what was taken of them."""

    seconds: float | None = None
    runs: int | None = None
    failures: int | None = None
    began: float = 0.0  # time.monotonic()
    started: int = 0
    failed: int = 0

    def exceeded_limit(self) -> str:
        """Which limit is reached, as a word on it; '' while none is."""
        if self.seconds is not None and time.monotonic() - self.began >= self.seconds:
            return f"{self.seconds:g} s"
        if self.runs is not None and self.started >= self.runs:
            return f"{self.runs} runs"
        if self.failures is not None and self.failed >= self.failures:
            return f"{self.failures} failures"
        return ""

    def count_failure(self, status: str) -> None:
        """A run that was begun came to its end."""
        self.failed += status in FAILURES


def parse_stop_after(stated: Sequence[str | int | float]) -> StopAfter:
    """The limits of stop_after's entries: seconds, or a number with s, m, h, d, runs or failures. Raises UserError."""
    budget = StopAfter(began=time.monotonic())
    for entry in stated:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(entry))
        unit = found.group(2) if found else "?"
        if found and unit in SECONDS:
            budget.seconds = float(found.group(1)) * SECONDS[unit]
        elif found and unit in COUNTS and found.group(1).isdecimal():
            setattr(budget, unit, int(found.group(1)))
        else:
            raise UserError(f"stop_after={entry} is not a budget: choose a time as 90m or 8h, 20runs, or 3failures")
    return budget
