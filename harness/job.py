"""One run as a rank reads it: a resolved file, with no trace of Hydra."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import RunConfig
from harness.data import Corpus
from harness.layout import Layout
from harness.typed import from_dict

FILE = "run.json"


@dataclass(frozen=True)
class Job:
    """What to run: the configuration, where its parts lie, and what the parent prepared for it."""

    run_id: str
    config: RunConfig
    layout: Layout
    corpus: Corpus
    device: str  # cpu | cuda
    threads: int  # of each rank
    allocator: str | None = None  # the counting allocator's library; None where it could not be built
    environment: dict[str, str] = field(default_factory=dict)  # set in every rank before its engine is built

    def write(self, run_dir: Path) -> None:
        (run_dir / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1))


def read(run_dir: Path) -> Job:
    values: dict[str, Any] = json.loads((run_dir / FILE).read_text())
    job: Job = from_dict(Job, values)
    return job


def snapshot_file(run_dir: Path, rank: int) -> Path:
    """A rank's memory, for torch's viewer; where measure.memory_snapshot asks for it."""
    return run_dir / "memory" / f"rank_{rank:05d}.pickle"


def rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "ranks" / f"rank_{rank:05d}.json"
