"""A recorded run as what is exported from it."""

from dataclasses import dataclass
from pathlib import Path

from harness import job, records
from harness.config import RunConfig
from harness.errors import UserError
from harness.layout import Layout


@dataclass(frozen=True)
class Recorded:
    """An `ok` run, where it lies, and where its export goes."""

    directory: Path
    target: Path
    config: RunConfig
    layout: Layout
    device: str  # cpu | cuda
    threads: int  # of each rank

    @property
    def micro_batches(self) -> int:
        return self.layout.accumulation(self.config.train)

    @property
    def ranks_per_node(self) -> int:
        return self.layout.world_size // self.config.cluster.nodes


def read(directory: Path, target: Path | None) -> Recorded:
    """Raises UserError where there is no run, or none that is `ok`."""
    row = records.read_record(directory)["row"]
    if row["status"] != "ok":
        raise UserError(f"{directory} has status={row['status']}, and only what ran is exported: choose an ok run")
    try:
        found = job.read(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / job.FILE} cannot be read ({error}): run it again with force=true") from None
    chosen = (target or directory / "export").resolve()
    return Recorded(directory.resolve(), chosen, found.config, found.layout, found.device, found.threads)
