"""TODO harness.records.run_folder."""

import json
import re
from pathlib import Path
from typing import Any

from harness.records.schema import Rank
from harness.util.errors import UserError


def comparison_folder(values: dict[str, Any]) -> Path:
    """Where the runs of a comparison go. Raises UserError for a name that would lead elsewhere."""
    name = str(values.get("name"))
    rule = "cannot name a folder of results: choose letters, digits, '.', '_' and '-', first a letter or digit"
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is None:
        raise UserError(f"name={name} {rule}")
    return Path(str(values.get("results_dir"))) / name


def snapshot_file(run_dir: Path, rank: int) -> Path:
    """A rank's memory, for torch's viewer; where measure.memory_snapshot asks for it."""
    return run_dir / "memory" / f"rank_{rank:05d}.pickle"


def rank_report_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "ranks" / f"rank_{rank:05d}.json"


RECORD_FILE = "record.json"


def read_rank_reports(run_dir: Path, world_size: int) -> list[Rank]:
    """The rank files there are, whole or not written at all."""
    paths = [rank_report_file(run_dir, rank) for rank in range(world_size)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]
