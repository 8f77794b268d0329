"""The speed of a configuration over its repeats, and when one is certainly faster than others.

Steps within a run tell nothing of how runs differ, so that only repeats decide. Disturbed runs decide nothing.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.records.schema import Record, Row

MINIMUM_RUNS = 3  # undisturbed repeats that a speed needs to be ranked

# How far ranges have to be apart to be told apart, as a part of the wider one. Of identical configurations with three
# repeats each, one would lead all others by luck: disjoint ranges alone allow that in 10 % of pairs, 4 % of three and
# 0.3 % of nine, whatever the distribution; this distance leaves at most 3.3 % of pairs under normal, uniform, skewed,
# heavy-tailed and two-valued noise (tests/unit/test_ranking.py draws them).
CLEARANCE = 0.5


@dataclass(frozen=True)
class Speed:
    """The tokens per second of one configuration."""

    median: float
    low: float  # the slowest run
    high: float  # the fastest run
    runs: int  # that these figures are of: the undisturbed ones, or all that ended ok if something disturbed all
    is_disturbed: bool  # whether something disturbed all runs, or too few steps were timed to know: a speed to ignore
    is_simulated: bool = False  # whether it is that of a model of the device, whose error no repeats would show

    @property
    def is_ranked(self) -> bool:
        """Whether the speed may be compared with others."""
        return self.runs >= MINIMUM_RUNS and not self.is_disturbed and not self.is_simulated

    @property
    def unranked_reason(self) -> str:
        """Why the speed may not be compared with others, such as "1 undisturbed run"; empty if it may."""
        if self.is_disturbed or self.is_simulated:
            return "disturbed" if self.is_disturbed else "simulated"
        return "" if self.is_ranked else f"{self.runs} undisturbed run{'s' if self.runs > 1 else ''}"


def is_undisturbed(row: Row) -> bool:
    """Return whether the speed of a run is known, enough steps were timed, and there is no sign of a disturbance.

    The interquartile range of the steps is recorded from four steps on. A simulated step is the same every time.
    """
    is_spread_known = row.get("step_seconds_iqr_ratio") is not None or row.get("launch") == "simulated"
    is_timed = bool(row.get("tokens_per_second")) and is_spread_known
    return row["status"] == "ok" and is_timed and not row.get("noise_warning")


def timed_runs(runs: Sequence[Record]) -> list[Record]:
    """Return the runs of a configuration that its speed and times are taken from, all of which ended ok.

    They are the undisturbed ones, or all if there is none.
    """
    return [run for run in runs if is_undisturbed(run.row)] or [run for run in runs if run.status == "ok"]


def speed_of(runs: Sequence[Record]) -> Speed | None:
    """Return the speed of a configuration by its runs, None where none is known."""
    timed = timed_runs(runs)
    speeds = [float(run.row["tokens_per_second"]) for run in timed if run.row.get("tokens_per_second")]
    if not speeds:
        return None
    is_disturbed = not is_undisturbed(timed[0].row)
    is_simulated = timed[0].row.get("launch") == "simulated"
    return Speed(statistics.median(speeds), min(speeds), max(speeds), len(speeds), is_disturbed, is_simulated)


def remedy(lines: Sequence[Record]) -> str:
    """Return what would rank the speeds of these configurations, of which none is ranked."""
    rows = [run.row for line in lines for run in line.runs or [line] if run.status == "ok"]
    repeats = "more repeats" if any(len(line.runs) >= MINIMUM_RUNS for line in lines) else f"repeats={MINIMUM_RUNS}"
    steps = "train.steps=10 and " if any(row.get("step_seconds_iqr_ratio") is None for row in rows) else ""
    where = " on a quiet machine" if any(row.get("noise_warning") for row in rows) else ""
    return f"{steps}{repeats}{where}"


def leads(first: Speed, others: Iterable[Speed]) -> bool:
    """Return whether a speed is certainly higher than all others.

    Its range of runs has to lie above each other range by more than CLEARANCE times the wider of the two.
    """
    width = first.high - first.low
    return all(first.low - other.high > CLEARANCE * max(width, other.high - other.low) for other in others)


def are_alike(first: Speed, other: Speed) -> bool:
    """Return whether two speeds differ by no more than runs vary."""
    return not leads(first, [other]) and not leads(other, [first])


def pool(speeds: Sequence[Speed]) -> Speed:
    """Return the speed of configurations that run the same program, which is the speed of all their runs."""
    return Speed(
        statistics.median(speed.median for speed in speeds),
        min(speed.low for speed in speeds),
        max(speed.high for speed in speeds),
        sum(speed.runs for speed in speeds),
        any(speed.is_disturbed for speed in speeds),
        any(speed.is_simulated for speed in speeds),
    )
