"""Weights & Biases: one W&B run for each run, in W&B's local file and, with mode=online, on its server."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.command import TrackingConfig
from harness.tracking.base import Scalar, TrackedRun, TrackerUnavailableError, Values, numbers
from harness.util.text import one_line

FLUSH_SECONDS = 2.0  # the most recent values that the file of a killed process may lack

MAX_TAG_CHARACTERS = 64  # W&B's limit

# W&B's environment variables that would change which run is written, and how. Those that say where the server is and
# which account to use stay.
CLEARED_VARIABLES = ("DISABLED", "MODE", "NOTES", "RESUME", "RUN_ID", "SERVICE", "SWEEP_ID")

# The x-axis of each group of values. W&B must not put any of these into the summary by itself: it holds the row.
AXES = {"train/*": "train/step", "live/*": "live/seconds", "memory/*": None}

# The tracker's names of step values that would be ambiguous there.
STEP_VALUE_NAMES = {"seconds": "step_seconds"}


def connect(config: TrackingConfig, timeout_seconds: float) -> "WandB":
    """Import W&B and return its tracker. Raises TrackerUnavailableError if W&B is not installed."""
    for name in CLEARED_VARIABLES:
        os.environ.pop(f"WANDB_{name}", None)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B reads it when it is imported
    try:
        import wandb
    except ImportError as error:
        raise TrackerUnavailableError(f"wandb cannot be imported ({one_line(error)})") from None
    logging.getLogger("wandb").setLevel(logging.ERROR)  # its log would repeat the configuration
    return WandB(wandb, config, timeout_seconds)


class WandB:
    """The tracker for Weights & Biases."""

    def __init__(self, library: Any, config: TrackingConfig, timeout_seconds: float) -> None:
        """Take the imported library; the timeout holds for registering a run, and again for receiving all of it."""
        self.library = library
        self.config = config
        self.timeout_seconds = timeout_seconds
        self.open_runs: dict[str, Any] = {}  # W&B's run objects, by TrackedRun.id

    def start_run(self, run: TrackedRun) -> None:
        """Register a run. Raises TrackerUnavailableError if the server does not accept it."""
        self.open_runs[run.id] = self.call_api(lambda: self.init_run(run, "run"))

    def log_live(self, run: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        """Log the state of a run that goes on under `live/`."""
        wandb_run = self.open_runs[run.id]
        self.call_api(lambda: wandb_run.log({f"live/{name}": value for name, value in figures.items()}))

    def finish_run(self, run: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        """Log steps under `train/`, the parts of the memory peak under `memory/`, and the row as the summary."""
        if run.id not in self.open_runs:
            self.start_run(run)
        wandb_run = self.open_runs.pop(run.id)

        def complete() -> None:
            wandb_run.config.update(dict(run.config), allow_val_change=True)
            wandb_run.tags = _tags(run)
            for step in steps:
                wandb_run.log(
                    {f"train/{STEP_VALUE_NAMES.get(key, key)}": value for key, value in numbers(step).items()}
                )
            parts = {
                key.replace("at_peak_", "memory/", 1): value
                for key, value in row.items()
                if key.startswith("at_peak_") and value is not None
            }
            if parts:  # W&B draws a series of one value as a bar, one run beside another
                wandb_run.log(parts)
            wandb_run.summary.update({key: value for key, value in row.items() if value not in (None, "")})

        self.finish(wandb_run, complete, 0 if row["status"] == "ok" else 1)

    def log_table(self, run: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        """Log all rows as a W&B table in a run of the type `summary`, with the number of rows of each status."""
        wandb_run = self.call_api(lambda: self.init_run(run, "summary"))

        def complete() -> None:
            data = [[row.get(column) for column in columns] for row in rows]
            wandb_run.log({"runs": self.library.Table(columns=list(columns), data=data, allow_mixed_types=True)})
            statuses = [row["status"] for row in rows]
            counts = {status: statuses.count(status) for status in set(statuses)}
            wandb_run.summary.update({"rows": len(rows)} | counts)

        self.finish(wandb_run, complete, 0)

    def close(self) -> None:
        """Mark all open runs as failed."""
        with suppress(Exception):  # the parent no longer listens
            for wandb_run in self.open_runs.values():
                wandb_run.finish(exit_code=1)

    def init_run(self, run: TrackedRun, job_type: str) -> Any:
        """Open a W&B run with its axes defined, and return it.

        Its times are bounded, it prints nothing, and nothing is collected of machine, user, code or command.
        """
        settings = self.library.Settings(
            init_timeout=self.timeout_seconds,
            finish_timeout=self.timeout_seconds,
            finish_timeout_raises=True,
            login_timeout=self.timeout_seconds,
            silent=True,
            host="",
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
        )
        wandb_run = self.library.init(
            mode=self.config.mode,
            entity=self.config.entity,
            project=self.config.project,
            id=run.id,
            group=run.group,
            name=run.name,
            job_type=job_type,
            tags=_tags(run),
            dir=str(run.folder),
            config=dict(run.config),
            reinit="create_new",  # several runs may be open at a time
            settings=settings,
        )
        for values, axis in AXES.items():
            if axis is not None:
                wandb_run.define_metric(axis, summary="none", hidden=True)
            wandb_run.define_metric(values, step_metric=axis, summary="none")
        return wandb_run

    def finish(self, wandb_run: Any, complete: Callable[[], None], exit_code: int) -> None:
        """Log the rest of a run by calling `complete`, and finish it.

        Raises TrackerUnavailableError unless all of the run's values are at the server, or in the file if offline.
        """
        try:
            self.call_api(complete)
        finally:
            self.call_api(lambda: wandb_run.finish(exit_code=exit_code))
        problem = _fatal_problem(Path(wandb_run.settings.log_internal))
        if problem:
            raise TrackerUnavailableError(f"W&B refused the data: {problem}")

    def call_api(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call to W&B, and turn whatever it raises into TrackerUnavailableError."""
        try:
            return call()
        except self.library.errors.UsageError as error:
            if "API key" not in str(error):
                raise TrackerUnavailableError(f"W&B: {one_line(error)}") from None
            message = "W&B has no key for its server: run `wandb login`, or set WANDB_API_KEY"
            raise TrackerUnavailableError(message) from None
        except Exception as error:
            message = one_line(str(error).partition("\n")[0]) or type(error).__name__
            raise TrackerUnavailableError(f"W&B: {message}") from None


def _tags(run: TrackedRun) -> tuple[str, ...]:
    return tuple(tag[:MAX_TAG_CHARACTERS] for tag in run.tags)


def _fatal_problem(log: Path) -> str:
    """Return why W&B stopped sending a run, '' if it did not.

    W&B's finish() raises only when it runs out of time; fatal errors are only in its log.
    """
    with suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):
                entry = json.loads(line)
                if str(entry.get("level", "")).startswith("ERROR+"):  # a level above ERROR
                    return one_line(entry.get("msg", ""))[:200]
    return ""
