"""One run as a rank reads it: a resolved file, with no trace of Hydra."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.command import split_values
from harness.config.from_dict import from_dict
from harness.config.schema import RunConfig
from harness.data.corpus import Corpus
from harness.layout.layout import Layout
from harness.records.run_folder import RunFolder


@dataclass(frozen=True)
class RunSpec:
    """What to run: the configuration, where its parts lie, and what the parent prepared for it."""

    run_id: str
    config: RunConfig
    layout: Layout
    corpus: Corpus
    device: str  # cpu | cuda
    threads: int  # of each rank
    allocator: str | None = None  # the counting allocator's library; None where it could not be built
    environment: dict[str, str] = field(default_factory=dict)  # set in every rank before its engine is built
    memory_snapshot: bool = False  # whether every rank writes one of its profiled step

    def write(self, run_dir: Path) -> None:
        RunFolder(run_dir).spec.write_text(json.dumps(dataclasses.asdict(self), indent=1))


def read_run_spec(run_dir: Path) -> RunSpec:
    values: dict[str, Any] = json.loads(RunFolder(run_dir).spec.read_text())
    values["config"] = split_values(values["config"])[0]  # older run files also have how the command went about it
    job: RunSpec = from_dict(RunSpec, values)
    return job
