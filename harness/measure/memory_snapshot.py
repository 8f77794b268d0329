"""The history of a step's memory in the format of torch.cuda.memory._snapshot(), for torch's viewer (memory_viz)."""

import pickle
from pathlib import Path
from typing import Any

from harness.measure.allocation_log import AllocationLog, StepAnnotations, allocations, name_at
from harness.measure.memory_attribution import owner_at

Snapshot = dict[str, Any]  # as torch defines it: segments with blocks, and of every device a list of requests


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot to a file that can be opened at https://pytorch.org/memory_viz."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(snapshot))


def snapshot_of_host(log: AllocationLog, annotations: StepAnnotations) -> Snapshot:
    """Return a CPU's log as one device's. A block's frames are its role, the operator that made it, and the phase."""
    blocks, phases = allocations(log), sorted(annotations.phases)
    lines: list[dict[str, Any]] = []
    for at, (moment, address, size) in enumerate(zip(log.moments, log.addresses, log.bytes, strict=True)):
        entry = {
            "addr": int(address),
            "size": abs(int(size)),
            "stream": 0,
            "time_us": int(moment),
            "frames": [],
        }
        if block := blocks.get(at):
            owner = owner_at(log, annotations, block, block.freed_at - 1)
            operator = name_at(annotations.operators, block.allocated_at, "no operator")
            phase = name_at(phases, block.allocated_at, "between phases")
            frames = [{"name": name, "filename": "", "line": 0} for name in (*owner, operator, phase)]
            lines.append(entry | {"action": "alloc", "frames": frames})
        else:
            lines += [entry | {"action": action} for action in ("free_requested", "free_completed")]
    return {"segments": [], "device_traces": [lines], "allocator_settings": {}, "external_annotations": []}
