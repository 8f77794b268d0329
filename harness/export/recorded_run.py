"""A recorded run as what is exported from it."""

from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.records.run_folder import RunFolder
from harness.records.run_spec import read_run_spec
from harness.records.store import read_record
from harness.util.errors import UserError


@dataclass(frozen=True)
class RecordedRun:
    """An `ok` run, where it lies, and where its export goes."""

    directory: Path
    target: Path
    config: RunConfig
    layout: Layout
    device: str  # cpu | cuda
    threads: int  # of each rank

    @property
    def micro_batches(self) -> int:
        return self.layout.grad_accumulation_steps(self.config.train)

    @property
    def ranks_per_node(self) -> int:
        return self.layout.world_size // self.config.cluster.nodes


def read_recorded_run(directory: Path, target: Path | None) -> RecordedRun:
    """Raises UserError where there is no run, or none that is `ok`."""
    row = read_record(directory)["row"]
    if row["status"] != "ok":
        raise UserError(f"{directory} has status={row['status']}, and only what ran is exported: choose an ok run")
    try:
        found = read_run_spec(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"{RunFolder(directory).spec} cannot be read ({error}): run it again with force=true") from None
    chosen = (target or RunFolder(directory).export).resolve()
    return RecordedRun(directory.resolve(), chosen, found.config, found.layout, found.device, found.threads)
