"""What is best among comparable lines: in speed, in memory, and on the front of both.

Charts, tables and sentences take the answers from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.cost_model.timing.interval import TIE
from harness.records.schema import Row
from harness.report.comparability import choice_key, group_by
from harness.report.labels import distinguishing
from harness.report.lines import Line, compared_lines, labels_of
from harness.report.speeds import Speed, leads, pool
from harness.report.text import sentence


@dataclass(frozen=True)
class Group:
    """The lines that a reader may choose between: those that ended ok, comparable, on as many ranks."""

    members: Sequence[Line]  # in the order of the report, each with a speed
    title: str = ""  # what distinguishes it from other groups, such as "on 4 ranks"; empty where it is the only one

    def relabelled(self) -> "Group":
        """Return the group with labels that are as short as they can be in it."""
        names, _ = labels_of([line.record for line in self.members])
        members = [replace(line, label=name) for line, name in zip(self.members, names, strict=True)]
        return Group(members, self.title)

    @cached_property
    def ranked(self) -> list[Line]:
        """The lines whose speeds may be compared, the fastest median first."""
        return sorted((line for line in self.members if line.speed.is_ranked), key=lambda line: -line.speed.median)

    @cached_property
    def _leaders(self) -> tuple[list[Line], list[Line]]:
        """The line that certainly leads all others, else those that may be the fastest.

        Identical programs are one rival. Undisturbed runs too few to be ranked block a winner if one was as fast.
        """
        rivals = group_by(self.ranked, lambda line: line.program)
        if len(rivals) < 2:
            return [], []
        pooled = {program: pool([line.speed for line in same]) for program, same in rivals.items()}
        first = max(pooled, key=lambda program: pooled[program].median)
        close = [program for program in pooled if program != first and not leads(pooled[first], [pooled[program]])]
        few = [line for line in self.members if line.program != first and line.speed.may_reach(pooled[first])]
        if not close and not few:
            return rivals[first], []
        return [], [line for line in self.ranked if line.program in (first, *close)]

    @property
    def fastest(self) -> list[Line]:
        """The line that certainly leads, or all that run its program; empty if none does."""
        return self._leaders[0]

    @property
    def contenders(self) -> list[Line]:
        """The ranked lines that may be the fastest, by their medians; empty if one leads."""
        return self._leaders[1]

    @property
    def winner(self) -> Line | None:
        """The line that certainly leads."""
        return next(iter(self.fastest), None)

    @property
    def first(self) -> Line:
        """The line that leads, certainly or by its median; there has to be a ranked one."""
        return [*self.fastest, *self.contenders, *self.ranked][0]

    @property
    def is_simulated(self) -> bool:
        """Whether all speeds are those of a model of the device."""
        return {line.speed.is_simulated for line in self.members} == {True}

    @property
    def is_tied(self) -> bool:
        """Whether several programs may be the fastest."""
        return len({line.program for line in self.contenders}) > 1

    @property
    def fastest_by_model(self) -> list[Line]:
        """The simulated lines with the highest speed, and those within the error of models, from the fastest on."""
        lines = sorted(self.members, key=lambda line: -line.speed.median)
        return [line for line in lines if (1 + TIE) * line.speed.median >= lines[0].speed.median]

    @cached_property
    def chosen(self) -> list[Line]:
        """What to take for speed: the fastest, else of those that may be the fastest the ones with the least memory.

        Of simulations a model of the device may be the fastest where it cannot tell the speed from the highest one.
        """
        if self.is_simulated:
            return Group(self.fastest_by_model).smallest or self.fastest_by_model[:1]
        return self.fastest or Group(self.contenders).smallest or self.contenders

    @property
    def slower(self) -> list[Line]:
        """The lines that are slower than all that may be the fastest, by the model where speeds are simulated."""
        if self.is_simulated:
            slower = [line for line in self.members if line not in self.fastest_by_model]
            return sorted(slower, key=lambda line: -line.speed.median)
        return [line for line in self.ranked if line not in (self.fastest or self.contenders)]

    @property
    def unranked(self) -> list[Line]:
        """The members whose speeds are not compared."""
        return [line for line in self.members if not line.speed.is_ranked]

    @cached_property
    def smallest(self) -> list[Line]:
        """The lines with the least peak memory."""
        peak = min((line.peak for line in self.members if line.peak), default=None)
        return [line for line in self.members if line.peak and line.peak == peak]

    @property
    def least(self) -> Line | None:
        """The first line with the least peak memory."""
        return next(iter(self.smallest), None)

    @cached_property
    def baseline(self) -> Line | None:
        """The line that sentences compare the others with."""
        return next(iter(compared_lines(self.members)), None)

    @property
    def reference(self) -> Line | None:
        """What the smallest is compared with: what to take for speed or the baseline, if another with a known peak."""
        reference = next(iter(self.chosen), self.baseline)
        return reference if reference and reference.peak and reference is not self.least else None

    @cached_property
    def front(self) -> list[Line]:
        """The ranked lines to choose between by the memory that there is, from the smallest peak on.

        Each is certainly faster than all before it on the front, and certainly slower than no smaller ranked line.
        """
        front: list[Line] = []
        before: list[Speed] = []  # of smaller candidates
        lowest = 0.0  # the highest lower end of all before
        for line in sorted(
            (line for line in self.ranked if line.peak), key=lambda line: (line.peak, -line.speed.median)
        ):
            speed = line.speed
            is_clear = leads(speed, [other.speed for other in front])
            if is_clear and not (lowest > speed.high and any(leads(other, [speed]) for other in before)):
                front.append(line)
            before.append(speed)
            lowest = max(lowest, speed.low)
        return front


def rank(lines: Sequence[Line]) -> tuple[list[Line], list[Group]]:
    """Return the lines with their places, and their groups: the largest first, of equal ones the one on most ranks."""
    members = group_by([line for line in lines if line.speed.runs], lambda line: choice_key(line.row)).values()
    ordered = sorted(members, key=lambda group: (len(group), group[0].row.get("world_size") or 0), reverse=True)
    titles = _titles(
        [group[0].row for group in ordered], [line.row for line in lines if line.ok and not line.speed.runs]
    )
    groups = [Group(group, title) for group, title in zip(ordered, titles, strict=True)]
    placed = {
        line: replace(line, group=number, is_on_front=line in group.front)
        for number, group in enumerate(groups)
        for line in group.members
    }
    groups = [Group([placed[line] for line in group.members], group.title) for group in groups]
    return [placed.get(line, line) for line in lines], groups


# The columns that may distinguish a group from others. Of the first ones those are named that do.
_MODEL = ("model", "adapter", "parameters")

_TITLED = (*_MODEL, "precision", "global_batch", "seq_len", "measured_on", "launch", "world_size")


def _titles(rows: Sequence[Row], others: Sequence[Row]) -> list[str]:
    """Return for a row of each group what distinguishes the group from all other lines, such as "on 4 ranks".

    A title is empty where there are no others: neither groups nor lines without a speed, which are in no group.
    """
    every = (*rows, *others)
    implied = {*_MODEL}.difference(distinguishing(every, _MODEL))
    differing = [name for name in _TITLED if name not in implied and len({row.get(name) for row in every}) > 1]
    if len(rows) < 2 and not differing:
        return [""] * len(rows)
    known = [
        {name: row.get(name) for name in differing if name == "adapter" or row.get(name) is not None} for row in rows
    ]
    return [sentence("group_title", values=values) for values in known]
