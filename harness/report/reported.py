"""Configurations and their groups as sentences name them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.records.schema import Record, Row
from harness.report.frame import column_values, records_frame
from harness.report.ranking import Group, common_baseline
from harness.report.speeds import Speed, timed_runs
from harness.report.view import View


@dataclass(frozen=True)
class Reported:
    """A configuration that ended ok, as sentences name it."""

    label: str  # unique in its group
    record: Record  # as merged
    speed: Speed
    program: int  # see Standing

    @property
    def row(self) -> Row:
        """The merged row."""
        row: Row = self.record.row
        return row

    @property
    def peak(self) -> int | None:
        """The peak memory of the rank with the largest one, in bytes."""
        peak: int | None = self.row.get("peak_allocated_bytes")
        return peak

    @cached_property
    def timed(self) -> list[Record]:
        """The runs that speed and times are taken from."""
        return timed_runs(self.record.runs)


@dataclass(frozen=True)
class ReportedGroup(Group[Reported]):
    """A group of comparable configurations, with the one that sentences compare the others with."""

    title: str  # what distinguishes it from other groups, such as "on 4 ranks"; empty where it is the only one
    baseline: Reported | None

    @property
    def where(self) -> str:
        """The title behind a space, as it follows another word."""
        return f" {self.title}" if self.title else ""

    @property
    def winner(self) -> Reported | None:
        """The configuration that certainly leads."""
        return self.fastest[0] if self.fastest else None

    @property
    def reference(self) -> Reported | None:
        """What the smallest is compared with: the winner, or the baseline."""
        return self.winner or self.baseline

    @property
    def unranked(self) -> list[Reported]:
        """The members whose speeds are not compared."""
        return [member for member in self.members if not member.speed.is_ranked]


def reported_groups(view: View, most: int) -> list[ReportedGroup]:
    """Return the largest groups of at least two configurations, at most `most` of them."""
    ranking = view.ranking
    groups = [group for group in ranking.groups if len(group.members) > 1]
    titles = {group.members: title for group, title in zip(ranking.groups, group_titles(view), strict=True)}
    return [reported_group(view, group, titles[group.members]) for group in groups[:most]]


def group_titles(view: View) -> list[str]:
    """Return for each group what distinguishes it from all other configurations, such as "on 4 ranks".

    A title is empty where there are no others. Configurations without a speed are in no group.
    """
    rows = [view.lines[group.members[0]].row for group in view.ranking.groups]
    standings = zip(view.lines, view.ranking.standings, strict=True)
    others = [line.row for line, standing in standings if line.status == "ok" and standing.group is None]
    differing = [name for name in _FORMATS if len({row.get(name) for row in (*rows, *others)}) > 1]
    return [_title(row, differing) for row in rows] if len(rows) > 1 or (rows and differing) else [""] * len(rows)


def reported_group(view: View, group: Group[int], title: str) -> ReportedGroup:
    """Return a group of the view under labels that are as short as they can be in it."""
    records = [view.lines[position] for position in group.members]
    labels = dict(zip(group.members, column_values(records_frame(records), "label"), strict=True))
    reported = {
        position: Reported(labels[position], view.lines[position], speed, standing.program)
        for position in group.members
        if (speed := (standing := view.ranking.standings[position]).speed)
    }
    baseline, _ = common_baseline(records)
    base = None if baseline is None else reported[group.members[baseline]]
    return ReportedGroup(**vars(group.mapped(reported.get)), title=title, baseline=base)


_FORMATS = {
    "model": "with {}",
    "parameters": "with {:,} parameters",
    "precision": "in {}",
    "global_batch": "at global batch {}",
    "seq_len": "at sequence length {}",
    "measured_on": "on {}",
    "launch": "launched as {}",
    "world_size": "on {} ranks",
}


def _title(row: Row, differing: Sequence[str]) -> str:
    """Return what distinguishes the group of a row from the groups of the others, which differ in these columns."""
    known = [_FORMATS[name].format(row[name]) for name in differing if row.get(name) is not None]
    return ", ".join(known).replace("on 1 ranks", "on 1 rank") or "a further setting"
