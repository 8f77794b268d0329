"""MLflow: each run with parameters, metrics and tags, in SQLite beside the runs or, with mode=online, on a server."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from harness.config.command import TrackingConfig
from harness.config.from_dict import flattened
from harness.tracking.base import Scalar, TrackedRun, TrackerUnavailableError, Values, numbers
from harness.util.locks import file_lock
from harness.util.text import one_line

LIBRARY = "mlflow"

BATCH = 100  # the parameters, or the tags, that MLflow takes in a request; of metrics it takes more

MAX_CHARACTERS = 5000  # of a tag or a parameter, MLflow's limit

ID_TAG = "harness_id"  # has TrackedRun.id; MLflow chooses ids itself


def connect(config: TrackingConfig, timeout_seconds: float) -> "MLflow":
    """Import MLflow and return its tracker. Raises TrackerUnavailableError if it or its server is missing."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow reads these when it is imported
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, round(timeout_seconds)))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    try:
        import mlflow
    except ImportError as error:
        raise TrackerUnavailableError(f"mlflow cannot be imported ({one_line(error)})") from None
    if config.mode == "online" and not (config.uri or os.environ.get("MLFLOW_TRACKING_URI")):
        raise TrackerUnavailableError(
            "MLflow has no server: name it by tracking.uri, --uri of harness sync, or MLFLOW_TRACKING_URI"
        )
    return MLflow(mlflow, config)


class MLflow:
    """The tracker for MLflow."""

    def __init__(self, library: Any, config: TrackingConfig) -> None:
        """Take the imported library."""
        self.library = library
        self.config = config
        self.clients: dict[str, Any] = {}  # by the URI of their store
        self.open_runs: dict[str, tuple[Any, str]] = {}  # clients and MLflow's ids of runs that go on, by TrackedRun.id

    def start_run(self, run: TrackedRun) -> None:
        """Register a run. Raises TrackerUnavailableError if the server does not accept it."""
        self.call_api(lambda: self.create_run(run))

    def log_live(self, run: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        """Log the numbers of a run that goes on under `live/`, by the seconds since its start."""
        step = int(figures["seconds"])
        self.call_api(lambda: self.log(run, metrics=[("live", figures, step)]))

    def finish_run(self, run: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        """Log the configuration as parameters, steps under `train/`, and the row as metrics and tags."""
        metrics = [*(("train", step, step["step"]) for step in steps), ("row", row, 0)]
        texts = {key: text for key, text in row.items() if isinstance(text, str) and text}

        def complete() -> None:
            if run.id not in self.open_runs:
                self.create_run(run)
            self.log(run, metrics, params=flattened(run.config), tags=texts | {"tags": ", ".join(run.tags)})
            self.finish(run.id, "FINISHED" if row["status"] == "ok" else "FAILED")

        self.call_api(complete)

    def log_table(self, run: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        """Log all rows as the table `runs.json` of a run."""

        def complete() -> None:
            self.create_run(run)
            client, run_id = self.open_runs[run.id]
            client.log_table(run_id, {column: [row.get(column) for row in rows] for column in columns}, "runs.json")
            self.finish(run.id, "FINISHED")

        self.call_api(complete)

    def close(self) -> None:
        """Mark all runs that go on as failed."""
        with suppress(Exception):  # the parent no longer listens
            for run_id in list(self.open_runs):
                self.finish(run_id, "FAILED")

    def create_run(self, run: TrackedRun) -> None:
        """Create a run in the project's experiment, in the place of one that was sent before."""
        client, experiment_id = self.store_of(run)
        for former in client.search_runs([experiment_id], f"tags.{ID_TAG} = '{run.id}'"):
            client.delete_run(former.info.run_id)
        tags = {ID_TAG: run.id, "group": run.group}
        created = client.create_run(experiment_id, tags=tags, run_name=run.name)
        self.open_runs[run.id] = client, created.info.run_id

    def store_of(self, run: TrackedRun) -> tuple[Any, str]:
        """Return the client of a run's store, and the project's experiment there, which is created if it is missing."""
        comparison = run.folder if run.folder.name == run.group else run.folder.parent
        own = comparison / LIBRARY
        is_online = self.config.mode == "online"
        uri = (self.config.uri or os.environ["MLFLOW_TRACKING_URI"]) if is_online else f"sqlite:///{own}/mlflow.db"
        with file_lock(own / "store.lock"):  # lest two commands make one database at once
            client = self.clients.get(uri) or self.clients.setdefault(uri, self.library.MlflowClient(uri))
            experiment = client.get_experiment_by_name(self.config.project)
            if experiment is not None:
                return client, experiment.experiment_id
            artifacts = None if is_online else (own / "artifacts").as_uri()
            return client, client.create_experiment(self.config.project, artifacts)

    def log(
        self,
        run: TrackedRun,
        metrics: Sequence[tuple[str, Values, int]],
        params: Values | None = None,
        tags: Values | None = None,
    ) -> None:
        """Log metrics, which are the numbers of groups at steps, parameters and tags, in as many requests as needed."""
        client, run_id = self.open_runs[run.id]
        entities, now = self.library.entities, time.time_ns() // 10**6
        kinds = (
            [
                entities.Metric(f"{group}/{key}", size, now, step)
                for group, values, step in metrics
                for key, size in numbers(values).items()
            ],
            [entities.Param(key, str(entry)[:MAX_CHARACTERS]) for key, entry in (params or {}).items()],
            [entities.RunTag(key, str(entry)[:MAX_CHARACTERS]) for key, entry in (tags or {}).items()],
        )
        for start in range(0, max(map(len, kinds)), BATCH):
            client.log_batch(run_id, *(entries[start : start + BATCH] for entries in kinds))

    def finish(self, id: str, status: str) -> None:
        """Set how a run ended."""
        client, run_id = self.open_runs.pop(id)
        client.set_terminated(run_id, status)

    def call_api(self, call: Callable[[], Any]) -> Any:
        """Return the result of calls to MLflow, and turn whatever they raise into TrackerUnavailableError."""
        try:
            return call()
        except Exception as error:
            message = one_line(str(error).partition("\n")[0]) or type(error).__name__
            raise TrackerUnavailableError(f"MLflow: {message}") from None
