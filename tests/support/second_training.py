"""An entry point of ranks that shows what is allocated when a reference trains a second time."""

import gc
from pathlib import Path
from typing import Any

from harness.worker import main as worker_main


def remaining_file(run_dir: Path, rank: int) -> Path:
    """Return the file that has the bytes which are allocated before a rank's second training."""
    return run_dir / f"remaining_{rank}"


def record_remaining_memory(run_dir: str) -> None:
    """Write how many bytes are allocated when the first training's engine is closed."""
    perturb = worker_main.perturb

    def recorded(spec: Any, rank: int, heartbeat: Any, mesh: Any, memory: Any) -> Any:
        gc.collect()
        remaining_file(Path(run_dir), rank).write_text(str(memory.allocated_bytes()))
        return perturb(spec, rank, heartbeat, mesh, memory)

    worker_main.perturb = recorded
    worker_main.main(run_dir)
