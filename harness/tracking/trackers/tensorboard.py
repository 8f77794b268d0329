"""TensorBoard: a file of events for each run, with losses by step, the row, and the configuration as its hparams."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.config.command import TrackingConfig
from harness.config.from_dict import flattened
from harness.tracking.base import Scalar, TrackedRun, TrackerUnavailableError, Values, numbers
from harness.util.text import one_line

LIBRARY = "tensorboard"

EVENTS = "events.out.tfevents."  # how the names of such files begin


def connect(config: TrackingConfig, timeout_seconds: float) -> "TensorBoard":
    """Import the writer of events and return its tracker. Raises TrackerUnavailableError if it cannot be imported."""
    try:
        import tensorboard.plugins.hparams.summary_v2  # noqa: F401
    except ImportError as error:
        raise TrackerUnavailableError(f"tensorboard cannot be imported ({one_line(error)})") from None
    return TensorBoard(config)


class TensorBoard:
    """The tracker for TensorBoard, which has no server of its own: the files are all that there is."""

    def __init__(self, config: TrackingConfig) -> None:
        self.config = config
        self.files: dict[str, IO[bytes]] = {}  # of the runs that go on, by TrackedRun.id

    def start_run(self, run: TrackedRun) -> None:
        """Begin the file of a run, in the place of that of an earlier attempt."""
        folder = Path(self.config.uri) / run.group / run.name if self.config.uri else run.folder / LIBRARY
        folder.mkdir(parents=True, exist_ok=True)
        for former in folder.glob(f"{EVENTS}*"):
            former.unlink()
        self.files[run.id] = open(folder / f"{EVENTS}{int(time.time())}.{run.id}", "wb")  # noqa: SIM115
        self.write(run.id, file_version="brain.Event:2")

    def log_live(self, run: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        """Log the numbers of a run that goes on under `live/`, by the seconds since its start."""
        self.write_numbers(run, "live", figures, step=int(figures["seconds"]))

    def finish_run(self, run: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        """Log the configuration, steps under `train/`, the row's numbers under `row/`, and the row as text.

        TensorBoard's numbers have seven digits; those of the text are exact.
        """
        from tensorboard.plugins.hparams import summary_v2

        if run.id not in self.files:
            self.start_run(run)
        config = {
            key: entry if isinstance(entry, Scalar) else str(entry) for key, entry in flattened(run.config).items()
        }
        self.write(run.id, summary=summary_v2.hparams_pb(config, trial_id=run.name))
        for step in steps:
            self.write_numbers(run, "train", step, step["step"])
        self.write_numbers(run, "row", row)
        self.write_table(run, "row", [entry for entry in row.items() if entry[1] not in (None, "")])
        self.finish(run.id, is_ok=row["status"] == "ok")

    def log_table(self, run: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        """Log all rows as the text of a run."""
        self.start_run(run)
        self.write_table(run, "runs", [columns, *([row.get(column) for column in columns] for row in rows)])
        self.finish(run.id, is_ok=True)

    def close(self) -> None:
        """Mark all runs that go on as failed."""
        for run_id in list(self.files):
            self.finish(run_id, is_ok=False)

    def write_numbers(self, run: TrackedRun, group: str, values: Values, step: int = 0) -> None:
        """Write the numbers among some values, each as a scalar of a group."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=f"{group}/{key}", simple_value=size) for key, size in numbers(values).items()]
        self.write(run.id, step=step, summary=Summary(value=scalars))

    def write_table(self, run: TrackedRun, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Write rows of cells as text, which TensorBoard shows as a table."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        self.write(run.id, summary=text_pb(name, np.array(cells, dtype=object)))

    def write(self, run_id: str, **content: Any) -> None:
        """Write an event, so that even a process that is killed leaves it behind."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        writer = RecordWriter(self.files[run_id])
        writer.write(Event(wall_time=time.time(), **content).SerializeToString())
        writer.flush()

    def finish(self, run_id: str, is_ok: bool) -> None:
        """Write how a run ended, and complete its file."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if is_ok else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        entry = Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info)),
            tensor=metadata.NULL_TENSOR,
        )
        self.write(run_id, summary=Summary(value=[entry]))
        with self.files.pop(run_id) as file:
            os.fsync(file.fileno())
