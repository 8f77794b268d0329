"""Records for the tests of tracking, and the two configurations of W&B."""

import json
from pathlib import Path
from typing import Any

from harness.records.schema import Record
from harness.records.store import read_record, write_record

OFFLINE = {"name": "wandb", "mode": "offline", "project": "here", "entity": None, "tags": ["mine"]}

ONLINE = OFFLINE | {"mode": "online"}


def write_example_record(comparison: Path, number: int = 0, **row: Any) -> tuple[Path, Record]:
    """Write a record with two steps; return its folder and the record."""
    run_id = f"ddp-none-tiny-w2-{number:010d}"
    record = {
        "row": {
            "run_id": run_id,
            "name": comparison.name,
            "status": "ok",
            "reason": "",
            "strategy": "ddp",
            "model": "tiny",
            "checkpointing": "none",
            "precision": "fp32",
            "tokens_per_second": 1000.5,
            "at_peak_parameter_bytes": 30,
            "at_peak_activation_bytes": 12,
            "mfu": None,
            "started_at": f"2026-01-02T03:{number:02d}:00+00:00",
        }
        | row,
        "config": {"name": comparison.name, "strategy": {"name": "ddp", "tp": 1}, "tracking": ONLINE},
        "environment": {"cores": 2},
        "versions": {"torch": "2.13.0"},
        "commit": {"commit": "a" * 40, "dirty": False},
    }
    run_dir = comparison / run_id
    write_record(run_dir, record)
    steps = [{"step": i, "phase": "timed", "loss": 5.5 - i, "grad_norm": 2.0, "seconds": 0.25} for i in range(2)]
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run_dir, read_record(run_dir)
