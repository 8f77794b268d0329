"""The speed of a configuration over its repeats, and when one is certainly faster than others.

Steps within a run tell nothing of how runs differ, so that only repeats decide. Disturbed runs decide nothing.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.records.schema import Record, Row
from harness.util.text import count_text

MINIMUM_RUNS = 3  # undisturbed repeats that a speed needs to be ranked

CROWDED = "more ranks than cores"  # why a speed is not ranked

# The runs of two configurations from which disjoint ranges tell them apart. Of identical ones with four runs each,
# 2 / C(8, 4) = 2.9 % of pairs are disjoint, whatever the distribution, and fewer with more runs: it is the least
# probable of all outcomes of Wilcoxon's rank-sum test.
DISJOINT_RUNS = 4

# How far ranges of fewer runs have to be apart, as a part of the wider one. With three runs each, one of several
# identical configurations would lead all others by luck: disjoint ranges alone allow that in 10 % of pairs, 4 % of
# three and 0.3 % of nine; this distance leaves at most 3.3 % of pairs under normal, uniform, skewed, heavy-tailed and
# two-valued noise (tests/unit/test_ranking.py draws them).
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
    is_crowded: bool = False  # whether ranks shared processor cores, so that it is no speed of the strategy

    @property
    def is_ranked(self) -> bool:
        """Whether the speed may be compared with others."""
        return self.runs >= MINIMUM_RUNS and not (self.is_disturbed or self.is_simulated or self.is_crowded)

    @property
    def has_too_few_runs(self) -> bool:
        """Whether the speed is not ranked for no other reason than too few runs."""
        return 0 < self.runs < MINIMUM_RUNS and not (self.is_disturbed or self.is_simulated or self.is_crowded)

    def may_reach(self, other: "Speed") -> bool:
        """Return whether the speed is not ranked for too few runs alone, of which one is as fast as one of the other's.

        Such a speed may be the higher one.
        """
        return self.has_too_few_runs and self.high >= other.low

    @property
    def unranked_reason(self) -> str:
        """Why the speed may not be compared with others, such as "1 undisturbed run"; empty if it may or is unknown."""
        if self.is_disturbed or self.is_simulated or self.is_crowded:
            return "disturbed" if self.is_disturbed else "simulated" if self.is_simulated else CROWDED
        return count_text(self.runs, "undisturbed run") if self.has_too_few_runs else ""


NO_SPEED = Speed(math.nan, math.nan, math.nan, 0, is_disturbed=False)  # of a configuration that has none


def is_undisturbed(row: Row) -> bool:
    """Return whether the speed of a run is known, enough steps were timed, and there is no sign of a disturbance."""
    is_timed = bool(row.get("tokens_per_second")) and has_enough_steps(row)
    return row["status"] == "ok" and is_timed and not row.get("noise_warning")


def has_enough_steps(row: Row) -> bool:
    """Return whether enough steps of a run were timed to notice a disturbance.

    The interquartile range of the steps is recorded from four steps on. A simulated step is the same every time.
    """
    return row.get("step_seconds_iqr_ratio") is not None or row.get("launch") == "simulated"


def is_crowded(record: Record) -> bool:
    """Return whether the ranks computed on the processor with less than one core each."""
    cores, ranks = record.environment.get("cores"), record.row.get("world_size")
    return record.row.get("measured_on") == "cpu" and cores is not None and ranks is not None and cores < ranks


def timed_runs(runs: Sequence[Record]) -> list[Record]:
    """Return the runs of a configuration that its speed and times are taken from, all of which ended ok.

    They are the undisturbed ones, or all if there is none.
    """
    return [run for run in runs if is_undisturbed(run.row)] or [run for run in runs if run.status == "ok"]


def speed_of(runs: Sequence[Record]) -> Speed:
    """Return the speed of a configuration by its runs, NO_SPEED where none is known."""
    timed = timed_runs(runs)
    speeds = [float(run.row["tokens_per_second"]) for run in timed if run.row.get("tokens_per_second")]
    if not speeds:
        return NO_SPEED
    is_disturbed = not is_undisturbed(timed[0].row)
    is_simulated = timed[0].row.get("launch") == "simulated"
    crowded = not is_simulated and any(is_crowded(run) for run in timed)
    return Speed(statistics.median(speeds), min(speeds), max(speeds), len(speeds), is_disturbed, is_simulated, crowded)


def leads(first: Speed, others: Iterable[Speed]) -> bool:
    """Return whether a speed is certainly higher than all others.

    Its range of runs has to lie above each other range, and where either has fewer runs than DISJOINT_RUNS by more than
    CLEARANCE times the wider of the two.
    """
    return all(first.low - other.high > _clearance(first, other) for other in others)


def _clearance(first: Speed, other: Speed) -> float:
    """Return the distance that tells two ranges apart."""
    if min(first.runs, other.runs) >= DISJOINT_RUNS:
        return 0.0
    return CLEARANCE * max(first.high - first.low, other.high - other.low)


def are_alike(first: Speed, other: Speed) -> bool:
    """Return whether neither of two speeds is certainly higher."""
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
        any(speed.is_crowded for speed in speeds),
    )
