"""The attribution of memory at its peak: every live block at that moment, and its role.

A log says which blocks were allocated and freed, claims say which tensors they belonged to, and spans say which
operator ran. The peak is computed from these afterwards, and each of its blocks is attributed to exactly one role, so
that there is no remainder.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from harness.measure.allocation_log import (
    Allocation,
    AllocationLog,
    Integers,
    OpSpan,
    Ownership,
    StepAnnotations,
    allocations,
    name_at,
)
from harness.records.rank_report import MEMORY_ROLES, AtPeak, PeakPart

_MAX_SKIPPED_BLOCKS = 100  # additional blocks that one operator of the example may have requested

# Operators of these namespaces request blocks for communication.
_COMMUNICATION_NAMESPACES = ("c10d::", "_c10d_functional::", "fsdp::", "deepspeed::")

# Operators that hand tensors to a communication backend. What they allocate are copies that the backend makes for
# itself, as gloo does to reduce; results of the functional collectives are allocated by operators of another namespace.
_BACKEND_NAMESPACE = "c10d::"

BACKEND = "buffers of the communication backend"

BEFORE = "allocated before the step"

BETWEEN = "between operators"


def attribute_peak(log: AllocationLog, annotations: StepAnnotations, example: AllocationLog) -> AtPeak | None:
    """Find the peak in a log and give each of its blocks a role, as its twin has in the example.

    The annotations belong to the example, which is the log itself or that of another step. A block that is not claimed
    by the peak takes the role for which it is claimed later: a block that becomes a gradient counts as a gradient while
    it is computed. Return None if the steps are not alike.
    """
    twins = _twins(log, annotations, example)
    if twins is None:
        return None
    line = _peak_line(log, annotations.pauses if log is example else ())
    moment = max((int(example.moments[twin]) for own, twin in twins.items() if own <= line), default=0)
    blocks = allocations(example)
    totals: Counter[tuple[str, str]] = Counter()
    for block in allocations(log).values():
        if block.line <= line < block.freed_line:
            owner = ("communication", BACKEND) if log.foreign[block.line] else ("temporary", BEFORE)
            if block.line in twins:
                owner = owner_at(example, annotations, blocks[twins[block.line]], moment)
            totals[owner] += int(log.bytes[block.line])
    parts = (PeakPart(*owner, size) for owner, size in totals.items())
    ordered = sorted(parts, key=lambda part: (MEMORY_ROLES.index(part.role), -part.bytes))
    phase = name_at(sorted(annotations.phases), moment, "between")
    return AtPeak(phase, totals.total(), tuple(ordered))


def peak_without_backend(log: AllocationLog, annotations: StepAnnotations, example: AllocationLog) -> int | None:
    """Return the most bytes that were live at once, not counting the copies that the communication backend makes.

    The moment at which gloo frees its copies depends on how far its threads lag behind, and NCCL makes none. The
    annotations belong to the example, as in attribute_peak. Return None if the two steps are not alike.
    """
    twins = _twins(log, annotations, example)
    if twins is None:
        return None
    sizes = np.append(log.bytes, 0)  # the last line frees the blocks that stay
    for block in allocations(log).values():
        moment = int(example.moments[twins[block.line]]) if block.line in twins else -1
        is_foreign = log.foreign[block.line] and block.line >= log.initial_count
        if is_foreign or name_at(annotations.operators, moment, BETWEEN).startswith(_BACKEND_NAMESPACE):
            sizes[[block.line, block.freed_line]] = 0
    line = _peak_line(log._replace(bytes=sizes[:-1]), annotations.pauses if log is example else ())
    return int(sizes[: line + 1].sum())


def _twins(log: AllocationLog, annotations: StepAnnotations, example: AllocationLog) -> dict[int, int] | None:
    """Return the line of the example's twin for each block that was live before the step or that Python requested.

    Python's thread requests the same blocks in the same order in both, so that each block has its twin in the example.
    Listeners to the example's operators make some of these request more blocks, which are skipped. Threads of a
    communication backend request and free their blocks at their own time. A block allocated before the step is
    recognized by its address, or else by its size. Return None if the steps are not alike.
    """
    if log is example:
        return {line: line for line in range(len(log.bytes))}
    own_lines, example_lines = _requests(log, ()), _requests(example, annotations.pauses)
    own_sizes, example_sizes = log.bytes[own_lines].tolist(), example.bytes[example_lines].tolist()
    matches: list[int] = []
    at = 0
    for size in own_sizes:
        try:
            at = example_sizes.index(size, at, at + _MAX_SKIPPED_BLOCKS) + 1
        except ValueError:
            return None
        matches.append(at - 1)
    requested = dict(zip(own_lines.tolist(), example_lines[matches].tolist(), strict=True))
    return requested | _initial_twins(log, example)


def _initial_twins(log: AllocationLog, example: AllocationLog) -> dict[int, int]:
    """Return the line of the example's twin for each block that was live before the step."""
    unmatched = {(int(example.addresses[at]), int(example.bytes[at])): at for at in range(example.initial_count)}
    twins, unknown = {}, []
    for at in range(log.initial_count):
        twin = unmatched.pop((int(log.addresses[at]), int(log.bytes[at])), None)
        if twin is None:
            unknown.append(at)
        else:
            twins[at] = twin
    by_size: dict[int, list[int]] = defaultdict(list)
    for (_, size), twin in unmatched.items():
        by_size[size].append(twin)
    return twins | {at: by_size[size].pop(0) for at in unknown if by_size[size := int(log.bytes[at])]}


def _peak_line(log: AllocationLog, pauses: Iterable[OpSpan]) -> int:
    """Return the line of the log after which the most bytes were live."""
    totals = np.cumsum(log.bytes)
    totals[: max(0, log.initial_count - 1)] = -1  # the lines of initial blocks are not in order of time
    totals[_paused(log, pauses)] = -1
    return int(np.argmax(totals))


def _paused(log: AllocationLog, pauses: Iterable[OpSpan]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return which lines were written in pauses, which are in order and not nested."""
    limits = np.array([(pause.start, pause.end) for pause in pauses], np.int64).reshape(-1, 2)
    if not len(limits):
        return np.zeros(len(log.moments), np.bool_)
    index = np.searchsorted(limits[:, 0], log.moments, side="right") - 1
    return np.asarray((index >= 0) & (log.moments < limits[index, 1]), np.bool_)


def _requests(log: AllocationLog, pauses: Iterable[OpSpan]) -> Integers:
    """Return the lines of blocks that Python's thread requested in the step itself, in order."""
    is_request = (log.bytes > 0) & (log.foreign == 0) & ~_paused(log, pauses)
    is_request[: log.initial_count] = False
    return np.flatnonzero(is_request)


def owner_at(log: AllocationLog, annotations: StepAnnotations, block: Allocation, peak: int) -> tuple[str, str]:
    """Return a block's role at the moment of the peak, and a detail: a kind of buffer, or the operator it ran in."""
    claims = [c for c in annotations.claims.get(block.address, ()) if block.allocated_at < c.moment <= block.freed_at]
    before = [claim for claim in claims if claim.moment <= peak]
    is_initial = block.line < log.initial_count
    claim = _in_force(before) if before else _later_claim(claims, is_initial)
    if claim is not None:
        return claim.role, claim.detail
    if log.foreign[block.line]:
        return "communication", BACKEND
    if is_initial:
        return "temporary", BEFORE
    phases = annotations.phases
    phase = next((phase for phase in phases if phase.start <= block.allocated_at < phase.end <= peak), None)
    if phase is not None:
        return "temporary", f"allocated in {phase.name}"
    operator = name_at(annotations.operators, block.allocated_at, BETWEEN)
    return "communication" if operator.startswith(_COMMUNICATION_NAMESPACES) else "temporary", operator


def _in_force(claims: Iterable[Ownership]) -> Ownership | None:
    """Return the claim of the role that takes precedence among those that a block has."""
    roles: dict[str, Ownership] = {}
    for claim in claims:
        if claim.is_owned:
            roles[claim.role] = claim
        else:
            roles.pop(claim.role, None)
    return min(roles.values(), key=_precedence, default=None)


def _later_claim(claims: Iterable[Ownership], is_initial: bool) -> Ownership | None:
    """Return the claim for which a block was allocated. A bucket, which outlives steps, is not yet a gradient."""
    later = [claim for claim in claims if claim.is_owned]
    return (max if is_initial else min)(later, key=_precedence, default=None)


def _precedence(claim: Ownership) -> int:
    return MEMORY_ROLES.index(claim.role)
