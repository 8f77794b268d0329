"""What TensorBoard, MLflow and trackio have of runs, read by their own readers, in one form for all."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = "here"


@dataclass
class StoredRun:
    """A run as a tracker has it."""

    name: str
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # by name, values with their steps
    texts: dict[str, str] = field(default_factory=dict)  # of the row
    config: dict[str, str] = field(default_factory=dict)  # by dotted keys
    is_ok: bool | None = None
    table: list[list[str]] = field(default_factory=list)  # of a comparison, the columns first

    def values(self, name: str) -> list[float]:
        """Return a series without its steps."""
        return [value for _, value in self.series.get(name, [])]


def text(value: Any) -> str:
    """Return a cell as all trackers can have it."""
    return "" if value is None else str(value)


def read_tensorboard(folder: Path) -> list[StoredRun]:
    """Return the runs below a folder by TensorBoard's reader of events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.tensor_util import make_ndarray

    runs = []
    for path in folder.glob("**/events.out.tfevents.*"):
        read = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        read.Reload()
        tags = read.Tags()
        run = StoredRun(path.parents[1].name if path.parent.name == "tensorboard" else path.parent.name)
        run.series = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags["scalars"]}
        for tag in tags["tensors"]:
            if tag.startswith("_hparams_"):
                data = HParamsPluginData.FromString(read.SummaryMetadata(tag).plugin_data.content)
                if data.HasField("session_start_info"):
                    hparams = data.session_start_info.hparams
                    run.config = {key: text(getattr(v, v.WhichOneof("kind"))) for key, v in hparams.items()}
                else:
                    run.is_ok = data.session_end_info.status == 1
                continue
            cells = make_ndarray(read.Tensors(tag)[0].tensor_proto).tolist()
            rows = [[cell.decode() for cell in line] for line in cells]
            run.table, run.texts = (rows, {}) if tag == "runs" else ([], dict(rows))
        runs.append(run)
    return runs


def read_mlflow(uri: str) -> list[StoredRun]:
    """Return the runs of the project's experiment by MLflow's client."""
    from mlflow import MlflowClient

    client, runs = MlflowClient(uri), []
    experiment = client.get_experiment_by_name(PROJECT)
    for entry in client.search_runs([experiment.experiment_id]) if experiment else []:
        key, data = entry.info.run_id, entry.data
        run = StoredRun(entry.info.run_name, texts=data.tags, config=data.params)
        history = {name: client.get_metric_history(key, name) for name in data.metrics}
        run.series = {name: sorted((point.step, point.value) for point in points) for name, points in history.items()}
        run.is_ok = {"FINISHED": True, "FAILED": False}.get(entry.info.status)
        if any(artifact.path == "runs.json" for artifact in client.list_artifacts(key)):
            table = json.loads(Path(client.download_artifacts(key, "runs.json")).read_text())
            run.table = [table["columns"], *([text(cell) for cell in line] for line in table["data"])]
        runs.append(run)
    return runs


TRACKIO = """
import json
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
runs = [(run.name, run.config, SQLiteStorage.get_logs("here", run.name, run_id=run.id)) for run in Api().runs("here")]
print(json.dumps(runs, default=str))
"""


def read_trackio(folder: Path) -> list[StoredRun]:
    """Return the runs of the project by trackio's own API, which has its folder from when it is imported."""
    if not (folder / f"{PROJECT}.db").exists():
        return []
    command, environment = [sys.executable, "-c", TRACKIO], os.environ | {"TRACKIO_DIR": str(folder)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    runs = []
    for name, config, logs in json.loads(printed.splitlines()[-1]):
        run, own = StoredRun(name), config or {}
        for log in logs:
            for key, value in log.items():
                if key == "runs":
                    rows = value["_value"]
                    run.table = [list(rows[0]), *([text(cell) for cell in row.values()] for row in rows)]
                elif isinstance(value, (int, float)) and key != "step":
                    run.series.setdefault(key, []).append((log["step"], value))
                elif key == "status":
                    run.is_ok = {"ok": True, "running": None}.get(value, False)
        run.texts = {key: text(value) for key, value in own.pop("row", {}).items()}
        run.config = {
            f"{key}.{name}": text(v)
            for key, group in own.items()
            if isinstance(group, dict)
            for name, v in group.items()
        }
        runs.append(run)
    return runs
