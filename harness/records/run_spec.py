"""The run file, which tells the ranks what to run: resolved values, with no trace of Hydra."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from harness.config.command import split_values
from harness.config.from_dict import from_dict
from harness.config.schema import Device, RunConfig
from harness.data.corpus import Corpus
from harness.layout.layout import Layout
from harness.records.run_folder import RunFolder
from harness.util.files import JsonObject


@dataclass(frozen=True)
class RunSpec:
    """The task of the ranks: the configuration, its layout, and what the parent prepared for them."""

    run_id: str
    config: RunConfig
    layout: Layout
    corpus: Corpus
    device: Device
    threads: int  # per rank
    allocator: str | None = None  # the counting allocator's library, if it could be built
    operator_log: str | None = None  # the library of the log by which a CPU's steps are traced, if it could be built
    timeout_seconds: float = 1800.0  # of the run, which its collectives outlast
    memory_snapshot: bool = False  # whether every rank writes one of its profiled step
    perturbs: bool = False  # whether the ranks train a second time, with other rounding
    simulated_ranks: tuple[int, ...] = ()  # the ranks that a simulated run plays, one after another
    device_guard: str | None = None  # the library that lets torch accept tensors on a CUDA device that is not there
    device_name: str = ""  # the name of the simulated device
    device_bytes: int | None = None  # the bytes of the whole simulated device; None is no limit

    def write(self, run_dir: Path) -> None:
        """Write the run file."""
        RunFolder(run_dir).spec.write_text(json.dumps(dataclasses.asdict(self), indent=1))


def read_run_spec(run_dir: Path) -> RunSpec:
    """Return what the run file says. Raise OSError or UserError if it is missing or damaged."""
    values: JsonObject = json.loads(RunFolder(run_dir).spec.read_text())
    values["config"] = split_values(values["config"])[0]  # older run files also have the keys of the command
    spec: RunSpec = from_dict(RunSpec, values)
    return spec
