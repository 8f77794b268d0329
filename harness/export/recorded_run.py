"""A run that is exported, recorded or planned, with the facts that every exported file needs."""

from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.records.run_folder import RunFolder, RunSpec, read_run_spec
from harness.records.store import read_run
from harness.util.text import UserError


@dataclass(frozen=True)
class RecordedRun:
    """A run, the folder that its run file lies in, and the folder that its export goes to: the same for a plan."""

    directory: Path
    target: Path
    spec: RunSpec

    @property
    def is_planned(self) -> bool:
        """Whether nothing was recorded, so that the export writes the run file too."""
        return self.directory == self.target

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self.spec.config

    @property
    def layout(self) -> Layout:
        """The arrangement of the ranks."""
        return self.spec.layout

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
    if resolved == directory.resolve():
        raise UserError(f"--to={target} is the run's own folder: choose another one")
    return RecordedRun(directory.resolve(), resolved, spec)
