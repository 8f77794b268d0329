"""A recorded run with the facts that every exported file needs."""

from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import Device, RunConfig
from harness.layout.layout import Layout
from harness.records.run_folder import RunFolder, read_run_spec
from harness.records.store import read_run
from harness.util.text import UserError


@dataclass(frozen=True)
class RecordedRun:
    """A run with status=ok, the folder it lies in, and the folder its export goes to."""

    directory: Path
    target: Path
    config: RunConfig
    layout: Layout
    device: Device
    threads: int  # of each rank

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that a rank runs in a step."""
        return self.layout.grad_accumulation_steps(self.config.train)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each machine."""
        return self.layout.world_size // self.config.cluster.nodes


def read_recorded_run(directory: Path, target: Path | None) -> RecordedRun:
    """Return the run in `directory`. Raises UserError if there is none, or if its status is not ok."""
    row = read_run(directory).row
    if row["status"] != "ok":
        raise UserError(f"{directory} has status={row['status']}, and only what ran is exported: choose an ok run")
    spec = read_run_spec(directory)
    resolved = (target or RunFolder(directory).export).resolve()
    return RecordedRun(directory.resolve(), resolved, spec.config, spec.layout, spec.device, spec.threads)
