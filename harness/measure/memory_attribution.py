"""What filled memory at its fullest: every live block at that moment, and whose it was.

A log says which blocks came and went, claims say what tensors they belonged to, spans which operator ran. From these
the peak is found afterwards, and each of its blocks goes to one role: nothing is a remainder.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from harness.records.schema import MEMORY_ROLES

_PASSED_OVER = 100  # blocks at most, of one operator

_MOVING = ("c10d::", "_c10d_functional::", "fsdp::", "deepspeed::")  # operators whose own blocks are communication's

BACKEND = "copies of the communication backend"

BEFORE = "from before the step"

BETWEEN = "between operators"


class AllocationLog(NamedTuple):
    """Blocks that came and went, in order. The first `standing` lines are those that were there at its beginning."""

    moments: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    addresses: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    bytes: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # negative: freed
    foreign: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # 1: by a thread that runs no Python
    standing: int


class Ownership(NamedTuple):
    """From here on a block has a role, or where `held` is False has it no more; freed blocks have none."""

    moment: int  # of the line of the log that comes next
    role: str
    what: str
    held: bool


class OpSpan(NamedTuple):
    """An operator or a phase: the lines of the log from the moment `begin` until before `end`."""

    begin: int
    end: int
    name: str


class PeakPart(NamedTuple):
    """Bytes of one role at the peak; `what` says more: a kind of buffer, the operator that made a temporary."""

    role: str
    what: str
    bytes: int


@dataclass
class StepAnnotations:
    """What is written down beside the log."""

    claims: dict[int, list[Ownership]] = field(default_factory=lambda: defaultdict(list))  # by address
    operators: list[OpSpan] = field(default_factory=list)  # in order, none inside another
    phases: list[OpSpan] = field(default_factory=list)  # of the step, in the order in which they end
    pauses: list[OpSpan] = field(default_factory=list)  # of the measuring's own, left out of the search for the peak

    def claim(self, moment: int, address: int, role: str, what: str, held: bool = True) -> None:
        self.claims[address].append(Ownership(moment, role, what, held))


@dataclass(frozen=True)
class PeakMemory:
    """The peak: when it was, its bytes as torch requested them, and what filled it. The parts add up to it."""

    moment: int
    bytes: int
    parts: tuple[PeakPart, ...]


class Allocation(NamedTuple):
    """One block's life in a log: the line that begins it, and the moments of its first and last line."""

    line: int
    address: int
    born: int
    died: int


def attribute_peak(log: AllocationLog, notes: StepAnnotations) -> PeakMemory:
    """Finds the peak in a log and gives each of its blocks to a role.

    A block that nobody has claimed by then takes the role it is claimed for later: what becomes a gradient is one while
    it is made.
    """
    line = _peak_line(log, notes.pauses)
    moment = int(log.moments[line])
    died = free_times(log)
    blocks = {
        at: Allocation(at, int(log.addresses[at]), int(log.moments[at]), died[at]) for at in _live_lines(log, line)
    }
    return _sum(moment, ((log.bytes[at], owner_at(log, notes, block, moment)) for at, block in blocks.items()))


def attribute_peak_by_example(log: AllocationLog, example: AllocationLog, notes: StepAnnotations) -> PeakMemory | None:
    """The same for the log of another step without notes, told by an example that has them.

    The thread of Python asks for the same blocks in the same order in both, so each here has its twin there. Threads of
    a communication backend do not, and let go of blocks when they come to it. A block from before the step is known by
    its address, or else by its size. None if the steps are not alike.
    """
    line = _peak_line(log, ())
    twins = _twins(log, example, notes)
    if twins is None:
        return None
    moment = max((int(example.moments[there]) for here, there in twins.items() if here <= line), default=0)
    twins |= _standing_twins(log, example)
    died = free_times(example)
    parts = []
    for at in _live_lines(log, line):
        there = twins.get(at)
        if there is None:
            told = ("communication", BACKEND) if log.foreign[at] else ("temporary", BEFORE)
        else:
            block = Allocation(there, int(example.addresses[there]), int(example.moments[there]), died[there])
            told = owner_at(example, notes, block, moment)
        parts.append((log.bytes[at], told))
    return _sum(moment, parts)


def _standing_twins(log: AllocationLog, example: AllocationLog) -> dict[int, int]:
    """The same for blocks that were there before."""
    left = {(int(example.addresses[at]), int(example.bytes[at])): at for at in range(example.standing)}
    found, unknown = {}, []
    for at in range(log.standing):
        there = left.pop((int(log.addresses[at]), int(log.bytes[at])), None)
        if there is None:
            unknown.append(at)
        else:
            found[at] = there
    by_size: dict[int, list[int]] = defaultdict(list)
    for (_, size), there in left.items():
        by_size[size].append(there)
    return found | {at: by_size[size].pop(0) for at in unknown if by_size[size := int(log.bytes[at])]}


def _twins(log: AllocationLog, example: AllocationLog, notes: StepAnnotations) -> dict[int, int] | None:
    """For each line where Python's thread asked for a block, the line of the example that did.

    What listens to the example's operators makes some ask for more: those are passed over.
    """
    mine, theirs = _asked_for(log, ()), _asked_for(example, notes.pauses).tolist()
    found: dict[int, int] = {}
    at = 0
    for line in mine.tolist():
        size = log.bytes[line]
        near = range(at, min(at + _PASSED_OVER, len(theirs)))
        ahead = next((i for i in near if example.bytes[theirs[i]] == size), None)
        if ahead is None:
            return None
        found[line] = theirs[ahead]
        at = ahead + 1
    return found


def _sum(moment: int, blocks: "Iterable[tuple[np.int64, tuple[str, str]]]") -> PeakMemory:
    found: Counter[tuple[str, str]] = Counter()
    for size, told in blocks:
        found[told] += int(size)
    parts = (PeakPart(*told, size) for told, size in found.items())
    ordered = sorted(parts, key=lambda part: (MEMORY_ROLES.index(part.role), -part.bytes))
    return PeakMemory(moment, sum(part.bytes for part in ordered), tuple(ordered))


def _peak_line(log: AllocationLog, pauses: Iterable[OpSpan]) -> int:
    """The line of the log after which most was live."""
    totals = np.cumsum(log.bytes)
    totals[: max(0, log.standing - 1)] = -1  # the list of what was there is no history
    totals[_paused(log, pauses)] = -1
    return int(np.argmax(totals))


def _paused(log: AllocationLog, pauses: Iterable[OpSpan]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    found = np.zeros(len(log.moments), np.bool_)
    for pause in pauses:
        found |= (log.moments >= pause.begin) & (log.moments < pause.end)
    return found


def _asked_for(log: AllocationLog, pauses: Iterable[OpSpan]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The lines of blocks that Python's thread asked for in the step itself, in order."""
    asked = (log.bytes > 0) & (log.foreign == 0) & ~_paused(log, pauses)
    asked[: log.standing] = False
    return np.flatnonzero(asked)


def _live_lines(log: AllocationLog, last: int) -> list[int]:
    """The lines of the blocks that are there after a line."""
    live: dict[int, int] = {}
    for line, (address, size) in enumerate(zip(log.addresses[: last + 1], log.bytes[: last + 1], strict=True)):
        if size > 0:
            live[int(address)] = line
        else:
            live.pop(int(address), None)
    return list(live.values())


def free_times(log: AllocationLog) -> list[int]:
    """For every line of a block that comes, the moment it goes; of one that stays, after the log."""
    died = [int(log.moments[-1]) + 1] * len(log.moments)
    live: dict[int, int] = {}
    for line, (address, size) in enumerate(zip(log.addresses, log.bytes, strict=True)):
        if size > 0:
            live[int(address)] = line
        elif int(address) in live:
            died[live.pop(int(address))] = int(log.moments[line])
    return died


def owner_at(log: AllocationLog, notes: StepAnnotations, block: Allocation, peak: int) -> tuple[str, str]:
    """A block's role at the moment of the peak, and a word more on it."""
    claims = [c for c in notes.claims.get(block.address, ()) if block.born < c.moment <= block.died]
    before = [claim for claim in claims if claim.moment <= peak]
    standing = block.line < log.standing
    found = _in_force(before) if before else _foreseen(claims, standing)
    if found is not None:
        return found.role, found.what
    if log.foreign[block.line]:
        return "communication", BACKEND
    if standing:
        return "temporary", BEFORE
    phase = next((phase for phase in notes.phases if phase.begin <= block.born < phase.end <= peak), None)
    if phase is not None:
        return "temporary", f"kept since {phase.name}"
    operator = name_at(notes.operators, block.born, BETWEEN)
    return "communication" if operator.startswith(_MOVING) else "temporary", operator


def _in_force(claims: Iterable[Ownership]) -> Ownership | None:
    """Of the roles that a block has, the one that counts first."""
    roles: dict[str, Ownership] = {}
    for claim in claims:
        if claim.held:
            roles[claim.role] = claim
        else:
            roles.pop(claim.role, None)
    return min(roles.values(), key=_order, default=None)


def _foreseen(claims: Iterable[Ownership], standing: bool) -> Ownership | None:
    """What a block is made for. One that outlives steps, a bucket, is not yet the gradient that it will hold."""
    later = [claim for claim in claims if claim.held]
    return (max if standing else min)(later, key=_order, default=None)


def _order(claim: Ownership) -> int:
    return MEMORY_ROLES.index(claim.role)


def name_at(spans: Sequence[OpSpan], moment: int, otherwise: str) -> str:
    """The span in which a line of the log was written."""
    index = bisect_right(spans, moment, key=lambda span: span.begin) - 1
    return spans[index].name if index >= 0 and moment < spans[index].end else otherwise
