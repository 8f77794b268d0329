"""A log of the blocks of memory that were allocated and freed, and the annotations made beside it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


class AllocationLog(NamedTuple):
    """Allocations and frees, in order. The first `initial_count` lines are the blocks that were live at its start."""

    moments: Integers
    addresses: Integers
    bytes: Integers  # negative if freed
    foreign: Integers  # 1 if another thread than Python's requested the block, such as a communication backend's
    initial_count: int


class Allocation(NamedTuple):
    """One block's life in a log: the lines and the moments of its allocation and its free."""

    line: int
    address: int
    allocated_at: int
    freed_at: int
    freed_line: int


class Ownership(NamedTuple):
    """The statement that from a moment on a block has a role, or no longer has it. A freed block has no role."""

    moment: int  # the moment of the next line of the log
    role: str
    detail: str
    is_owned: bool


class OpSpan(NamedTuple):
    """An operator or a phase: the lines of the log from the moment `start` until before `end`."""

    start: int
    end: int
    name: str


@dataclass
class StepAnnotations:
    """The annotations recorded beside the log of a step."""

    claims: dict[int, list[Ownership]] = field(default_factory=lambda: defaultdict(list))  # the key is the address
    operators: list[OpSpan] = field(default_factory=list)  # in order, not nested
    phases: list[OpSpan] = field(default_factory=list)  # the step's phases, in the order in which they end
    pauses: list[OpSpan] = field(default_factory=list)  # spans of the measurement itself, in which no peak is counted

    def claim(self, moment: int, addresses: Iterable[int], role: str, detail: str, is_owned: bool = True) -> None:
        """Record that from a moment on the blocks at these addresses have a role, or no longer have it."""
        ownership = Ownership(moment, role, detail, is_owned)
        for address in addresses:
            self.claims[address].append(ownership)


def allocations(log: AllocationLog) -> dict[int, Allocation]:
    """Return every block's life by the line of its allocation; a block that stays is freed at a line after the last."""
    moments, addresses = [*log.moments.tolist(), int(log.moments[-1]) + 1], log.addresses.tolist()
    live: dict[int, int] = {}
    freed_lines: dict[int, int] = {}
    for line, (address, size) in enumerate(zip(addresses, log.bytes.tolist(), strict=True)):
        if size > 0:
            live[address], freed_lines[line] = line, len(addresses)
        elif address in live:
            freed_lines[live.pop(address)] = line
    return {
        line: Allocation(line, addresses[line], moments[line], moments[freed_line], freed_line)
        for line, freed_line in freed_lines.items()
    }


def name_at(spans: Sequence[OpSpan], moment: int, default: str) -> str:
    """Return the name of the span in which a line of the log was written; `spans` are in order and not nested."""
    index = bisect_right(spans, moment, key=lambda span: span.start) - 1
    return spans[index].name if index >= 0 and moment < spans[index].end else default
