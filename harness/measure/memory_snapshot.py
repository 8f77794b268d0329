"""The history of a step's memory in the form of torch.cuda.memory._snapshot(), for torch's viewer (memory_viz)."""

import pickle
from pathlib import Path
from typing import Any

from harness.measure.memory_attribution import Allocation, AllocationLog, StepAnnotations, free_times, name_at, owner_at


def write_snapshot(path: Path, snapshot: dict[str, Any]) -> None:
    """Drop the file on https://pytorch.org/memory_viz."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(snapshot))


def snapshot_of_host(log: AllocationLog, notes: StepAnnotations) -> dict[str, Any]:
    """A CPU's log as one device's. A block's frames are its role, the operator that made it, and the phase."""
    died, phases = free_times(log), sorted(notes.phases)
    lines: list[dict[str, Any]] = []
    for at, (moment, address, size) in enumerate(zip(log.moments, log.addresses, log.bytes, strict=True)):
        entry = {"addr": int(address), "size": abs(int(size)), "stream": 0, "time_us": int(moment), "frames": []}
        if size > 0:
            block = Allocation(at, int(address), int(moment), died[at])
            named = owner_at(log, notes, block, died[at] - 1)
            within = name_at(notes.operators, block.born, "no operator"), name_at(phases, block.born, "between phases")
            frames = [{"name": name, "filename": "", "line": 0} for name in (*named, *within)]
            lines.append(entry | {"action": "alloc", "frames": frames})
        else:
            lines += [entry | {"action": action} for action in ("free_requested", "free_completed")]
    return {"segments": [], "device_traces": [lines], "allocator_settings": {}, "external_annotations": []}
