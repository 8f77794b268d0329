"""Trackio: the runs of a project in its SQLite database, in TRACKIO_DIR or in the folder of trackio's own choice."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.command import TrackingConfig
from harness.tracking.base import Scalar, TrackedRun, TrackerUnavailableError, Values, numbers
from harness.util.text import one_line

LIBRARY = "trackio"


def connect(config: TrackingConfig, timeout_seconds: float) -> "Trackio":
    """Import trackio and return its tracker.

    Raises TrackerUnavailableError if it cannot be imported, and for a folder on a network, where writers on several
    machines damage a database.
    """
    try:
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage
    except ImportError as error:
        raise TrackerUnavailableError(f"trackio cannot be imported ({one_line(error)})") from None
    if utils.get_storage_mode() != "sqlite":
        raise TrackerUnavailableError(f"{utils.TRACKIO_DIR} is on a network: set TRACKIO_DIR to a folder on a disk")
    return Trackio(SQLiteStorage, config)


class Trackio:
    """The tracker for trackio. This process alone writes for its command; trackio's lock makes those of others wait."""

    def __init__(self, storage: Any, config: TrackingConfig) -> None:
        """Take the storage of the imported library, which has written when a call returns, and raises what fails."""
        self.storage = storage
        self.config = config
        self.open_runs: dict[str, TrackedRun] = {}  # by TrackedRun.id

    def start_run(self, run: TrackedRun) -> None:
        """Register a run."""
        self.open_runs[run.id] = run
        self.log(run, [(0, {"status": "running"})], run.config)

    def log_live(self, run: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        """Log the state of a run that goes on under `live/`, by the seconds since its start."""
        self.log(run, [(int(figures["seconds"]), {f"live/{key}": figure for key, figure in figures.items()})])

    def finish_run(self, run: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        """Log steps under `train/`, the row's numbers under `row/`, and the whole row in the configuration."""
        if self.open_runs.pop(run.id, None) is None:  # it may be there from before
            self.storage.delete_run(self.config.project, run.name, run.id)
        trained = [(step["step"], {f"train/{key}": size for key, size in numbers(step).items()}) for step in steps]
        last = {f"row/{key}": size for key, size in numbers(row).items()} | {"status": row["status"]}
        known = {key: entry for key, entry in row.items() if entry not in (None, "")}
        self.log(run, [*trained, (len(steps), last)], {**run.config, "row": known})

    def log_table(self, run: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        """Log all rows as a table in a run."""
        from trackio import Table

        self.storage.delete_run(self.config.project, run.name, run.id)
        table = Table(columns=list(columns), data=[[row.get(column) for column in columns] for row in rows])
        self.log(run, [(0, {"runs": table._to_dict(self.config.project, run.name)})])

    def close(self) -> None:
        """Mark all runs that go on as failed."""
        for run in self.open_runs.values():
            self.log(run, [(0, {"status": "failed"})])

    def log(self, run: TrackedRun, entries: Sequence[tuple[int, Values]], config: Values | None = None) -> None:
        """Write values, each mapping at its step, and the configuration if there is one."""
        own = {"_Group": run.group, "tags": ", ".join(run.tags)}
        self.storage.bulk_log(
            self.config.project,
            run.name,
            [dict(values) for _, values in entries],
            [step for step, _ in entries],
            config=None if config is None else {**config, **own},
            run_id=run.id,
        )
