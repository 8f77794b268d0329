"""The history of a step's memory in the format of torch.cuda.memory._snapshot(), for torch's viewer (memory_viz)."""

import pickle
from pathlib import Path
from typing import TypedDict

from harness.measure.allocation_log import Allocation, AllocationLog, StepAnnotations, free_times, name_at
from harness.measure.memory_attribution import owner_at


class Frame(TypedDict):
    """One line of the stack trace that torch's viewer shows of a block."""

    name: str
    filename: str
    line: int


class _Request(TypedDict):
    addr: int
    size: int
    stream: int
    time_us: int
    frames: list[Frame]


class TraceEntry(_Request, total=False):
    """A request to the allocator, in order of time."""

    action: str  # alloc, free_requested, free_completed and others


class Block(TypedDict):
    """A block within a segment; torch has further keys."""

    address: int
    requested_size: int
    state: str


class Segment(TypedDict):
    """A piece of memory that torch's allocator has taken from a device; torch has further keys."""

    device: int
    blocks: list[Block]


class MemorySnapshot(TypedDict):
    """The keys of torch.cuda.memory._snapshot() that are used here; torch has further ones."""

    segments: list[Segment]
    device_traces: list[list[TraceEntry]]  # of every device
    allocator_settings: dict[str, str]
    external_annotations: list[str]


def write_snapshot(path: Path, snapshot: MemorySnapshot) -> None:
    """Write a snapshot to a file that can be opened at https://pytorch.org/memory_viz."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(snapshot))


def snapshot_of_host(log: AllocationLog, annotations: StepAnnotations) -> MemorySnapshot:
    """Return a CPU's log as one device's. A block's frames are its role, the operator that made it, and the phase."""
    freed_at, phases = free_times(log), sorted(annotations.phases)
    lines: list[TraceEntry] = []
    for at, (moment, address, size) in enumerate(zip(log.moments, log.addresses, log.bytes, strict=True)):
        entry: TraceEntry = {
            "addr": int(address),
            "size": abs(int(size)),
            "stream": 0,
            "time_us": int(moment),
            "frames": [],
        }
        if size > 0:
            block = Allocation(at, int(address), int(moment), freed_at[at])
            owner = owner_at(log, annotations, block, freed_at[at] - 1)
            operator = name_at(annotations.operators, block.allocated_at, "no operator")
            phase = name_at(phases, block.allocated_at, "between phases")
            frames: list[Frame] = [{"name": name, "filename": "", "line": 0} for name in (*owner, operator, phase)]
            lines.append(entry | {"action": "alloc", "frames": frames})
        else:
            lines += [entry | {"action": action} for action in ("free_requested", "free_completed")]
    return {"segments": [], "device_traces": [lines], "allocator_settings": {}, "external_annotations": []}
