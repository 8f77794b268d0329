"""What is best among comparable configurations: in speed, in memory, and on the front of both.

Charts, tables and sentences take the answers from here. Positions are those of `View.lines`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from harness.config.fingerprint import result_affecting_keys
from harness.records.schema import Record
from harness.report.comparability import choice_key, comparability_key, group_by, key_text
from harness.report.labels import non_default
from harness.report.speeds import Speed, leads, pool, speed_of

T = TypeVar("T")

U = TypeVar("U")


@dataclass(frozen=True)
class Group(Generic[T]):
    """The configurations that a reader may choose between: those that ended ok, comparable, on as many ranks."""

    members: tuple[T, ...]  # in the order of the report
    ranked: tuple[T, ...]  # those whose speeds may be compared, the fastest median first
    fastest: tuple[T, ...]  # the one that certainly leads, or all that run its program; empty if none does
    contenders: tuple[T, ...]  # if none leads: the ranked ones that may be the fastest, by their medians
    smallest: tuple[T, ...]  # those with the least peak memory
    front: tuple[T, ...]  # from the smallest to the fastest, each certainly faster than all before it, see _front

    def mapped(self, function: Callable[[T], U | None]) -> "Group[U]":
        """Return the group of what a function gives for each configuration, without those for which it gives None."""
        return Group(*(tuple(new for old in own if (new := function(old)) is not None) for own in vars(self).values()))


@dataclass(frozen=True)
class Standing:
    """The place of one configuration among those that it may be compared with."""

    speed: Speed | None  # None where no run ended ok
    group: int | None  # the position of its group in `Ranking.groups`; None where no run ended ok
    program: int  # equal for configurations that run the same program, such as `tp` and `single` on one rank
    is_on_front: bool = False


@dataclass(frozen=True)
class Ranking:
    """The groups of comparable configurations, and the place of every configuration."""

    groups: tuple[Group[int], ...]  # the largest first, of equal ones the one on most ranks
    standings: tuple[Standing, ...]  # one for each line

    def part(self, positions: Sequence[int]) -> "Ranking":
        """Return the ranking of these lines alone, which keep the places that they have among all lines."""
        new = {position: index for index, position in enumerate(positions)}
        groups = tuple(group.mapped(new.get) for group in self.groups)
        return Ranking(groups, tuple(self.standings[position] for position in positions))

    def among(self, group: Group[int], positions: Collection[int]) -> Group[int]:
        """Return the group of some of its members alone, such as those that fit in a device's memory.

        The front stays that of the whole group.
        """
        part = group.mapped(lambda position: position if position in positions else None)
        speeds = {position: speed for position in part.members if (speed := self.standings[position].speed)}
        first = _fastest(part.ranked, speeds, [standing.program for standing in self.standings])
        return Group(part.members, part.ranked, *first, part.smallest, part.front)


def rank(lines: Sequence[Record]) -> Ranking:
    """Return the ranking of configurations, each of which is a record with the merged row of its repeats."""
    speeds = [speed_of(line.runs or [line]) if line.status == "ok" else None for line in lines]
    programs = _programs(lines)
    known = [position for position, speed in enumerate(speeds) if speed is not None]
    members = group_by(known, lambda position: choice_key(lines[position].row)).values()
    ordered = sorted(members, key=lambda group: (len(group), lines[group[0]].row.get("world_size") or 0), reverse=True)
    groups = tuple(_group(group, lines, speeds, programs) for group in ordered)
    group_of = {position: number for number, group in enumerate(groups) for position in group.members}
    on_front = {position for group in groups for position in group.front}
    standings = [
        Standing(speed, group_of.get(position), programs[position], position in on_front)
        for position, speed in enumerate(speeds)
    ]
    return Ranking(groups, tuple(standings))


def _programs(lines: Sequence[Record]) -> list[int]:
    """Return for each line the position of the first line that runs the same program."""
    first: dict[Any, int] = {}
    return [first.setdefault(program_key(line) or position, position) for position, line in enumerate(lines)]


def program_key(line: Record) -> str | None:
    """Return a key that is equal for configurations that run the same program; None where the layout is not recorded.

    It has the resolved layout without what a single pipeline stage or a single tensor-parallel rank ignores, the
    engine's options, and all other keys of the configuration that affect results.
    """
    if not line.layout or not line.config:
        return None
    config = result_affecting_keys(line.config)
    ignored = [key for degree, keys in _IGNORED.items() if line.layout.get(degree) == 1 for key in keys]
    layout = {key: value for key, value in line.layout.items() if key not in ignored}
    strategy = config.get("strategy") or {}
    options = {key: strategy.get(key) for key in ("literature", "options")}
    others = {key: value for key, value in config.items() if key not in ("strategy", "repeat", "world_size")}
    return key_text([layout, options, others])


# The keys of a layout that a single pipeline stage and a single tensor-parallel rank ignore.
_IGNORED = {
    "pp": ("schedule", "virtual_stages", "layers_per_stage"),
    "tp": ("sequence_parallel", "vocabulary_parallel"),
}


def _group(
    members: Sequence[int], lines: Sequence[Record], speeds: Sequence[Speed | None], programs: Sequence[int]
) -> Group[int]:
    """Return one group of comparable configurations, of which each has a speed."""
    by_position = {position: speed for position in members if (speed := speeds[position]) is not None}
    ranked = sorted((p for p in members if by_position[p].is_ranked), key=lambda p: (-by_position[p].median, p))
    peaks = {p: peak for p in members if (peak := lines[p].row.get("peak_allocated_bytes"))}
    least = min(peaks.values(), default=None)
    smallest = tuple(position for position, peak in peaks.items() if peak == least)
    front = _front([position for position in ranked if position in peaks], by_position, peaks)
    return Group(tuple(members), tuple(ranked), *_fastest(ranked, by_position, programs), smallest, front)


def _fastest(
    ranked: Sequence[int], speeds: Mapping[int, Speed], programs: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the configuration that certainly leads all others, else those that may be the fastest.

    Identical programs are one rival. Undisturbed runs too few to be ranked block a winner if one of them was as fast.
    """
    rivals = group_by(ranked, lambda position: programs[position])
    if len(rivals) < 2:
        return (), ()
    pooled = {program: pool([speeds[position] for position in same]) for program, same in rivals.items()}
    first = max(pooled, key=lambda program: pooled[program].median)
    close = [program for program in pooled if program != first and not leads(pooled[first], [pooled[program]])]
    few = [speed for position, speed in speeds.items() if speed.has_too_few_runs and programs[position] != first]
    if not close and all(speed.high < pooled[first].low for speed in few):
        return tuple(rivals[first]), ()
    return (), tuple(position for position in ranked if programs[position] in (first, *close))


def _front(candidates: Sequence[int], speeds: Mapping[int, Speed], peaks: Mapping[int, int]) -> tuple[int, ...]:
    """Return the candidates to choose between by the memory that there is, from the smallest peak on.

    Each is certainly faster than all before it on the front, and certainly slower than no candidate that is smaller.
    """
    front: list[int] = []
    before: list[Speed] = []  # of smaller candidates
    lowest = 0.0  # the highest lower end of all before
    for position in sorted(candidates, key=lambda position: (peaks[position], -speeds[position].median)):
        speed = speeds[position]
        is_clear = leads(speed, [speeds[other] for other in front])
        if is_clear and not (lowest > speed.high and any(leads(other, [speed]) for other in before)):
            front.append(position)
        before.append(speed)
        lowest = max(lowest, speed.low)
    return tuple(front)


def common_baseline(lines: Sequence[Record]) -> tuple[int | None, frozenset[int]]:
    """Return the one line that all ratios of a table refer to, and the lines that are comparable with it.

    It is `ddp`, or where `ddp` ran on several numbers of ranks `single`, else `ddp` on the fewest, else the first, of
    the largest set of comparable lines; among several the one without checkpointing, on the fewest ranks and with the
    fewest other options. There is none if fewer than half of the lines that ended ok could be compared with it.
    """
    ok = [position for position, line in enumerate(lines) if line.status == "ok"]
    settings = group_by(ok, lambda position: comparability_key(lines[position].row))
    largest = max(settings.values(), key=len, default=[])
    if len(largest) < 2 or 2 * len(largest) < len(ok):
        return None, frozenset()
    of_strategy = group_by(largest, lambda position: lines[position].row.get("strategy"))
    ddp, single = of_strategy.get("ddp", []), of_strategy.get("single", [])
    has_one_size = len({lines[position].row.get("world_size") for position in ddp}) == 1
    candidates = ddp if has_one_size else single or ddp or largest

    def variations(position: int) -> tuple[bool, int, int]:
        row = lines[position].row
        return row.get("checkpointing") not in (None, "none"), row.get("world_size") or 0, len(non_default(row))

    return min(candidates, key=variations), frozenset(largest)
