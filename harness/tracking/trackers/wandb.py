"""Weights & Biases: a run a run, grouped by comparison, in a file of W&B's own and, with mode=online, at its server."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.schema import TrackingConfig
from harness.tracking.base import Scalar, TrackedRun, TrackerUnavailable, Values
from harness.util.text import one_line

FLUSH_SECONDS = 2.0  # what a killed process may lack at the end of its file

TAG_CHARACTERS = 64  # W&B's limit

# Settings of W&B's that would make another run of it than ours; those on where its server is and who asks stay.
STEERING = ("DISABLED", "MODE", "NOTES", "RESUME", "RUN_ID", "SERVICE", "SWEEP_ID")

# The axis of each group of values. None goes to the summary by itself: that holds the row.
AXES = {"train/*": "train/step", "live/*": "live/seconds", "memory/*": None}


def connect(config: TrackingConfig, seconds: float) -> "WandB":
    """Raises Unreachable where W&B is not installed or has no key for its server."""
    for name in STEERING:
        os.environ.pop(f"WANDB_{name}", None)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # read as the library is imported
    try:
        import wandb
    except ImportError as error:
        raise TrackerUnavailable(f"wandb cannot be imported ({one_line(error)})") from None
    logging.getLogger("wandb").setLevel(logging.ERROR)  # its log would repeat the configuration
    return WandB(wandb, config, seconds)


class WandB:
    def __init__(self, library: Any, config: TrackingConfig, seconds: float) -> None:
        self.library = library
        self.config = config
        self.seconds = seconds  # to begin a run, and after its last value for all of them to be there
        self.open: dict[str, Any] = {}  # W&B's runs, by our id

    def start_run(self, subject: TrackedRun) -> None:
        self.open[subject.id] = self.call_api(lambda: self.start(subject, "run"))

    def log_live(self, subject: TrackedRun, figures: Mapping[str, Scalar]) -> None:
        run = self.open[subject.id]
        self.call_api(lambda: run.log({f"live/{name}": value for name, value in figures.items()}))

    def finish_run(self, subject: TrackedRun, row: Values, steps: Sequence[Values]) -> None:
        if subject.id not in self.open:
            self.start_run(subject)
        run = self.open.pop(subject.id)

        def complete() -> None:
            run.config.update(dict(subject.config), allow_val_change=True)
            run.tags = _tags(subject)
            for step in steps:
                run.log({f"train/{_NAMES.get(key, key)}": value for key, value in step.items() if _is_number(value)})
            parts = {key: value for key, value in row.items() if key.startswith("at_peak_") and value is not None}
            if parts:  # W&B draws what has one value as bars, run beside run
                run.log({f"memory/{key.removeprefix('at_peak_')}": value for key, value in parts.items()})
            run.summary.update({key: value for key, value in row.items() if value not in (None, "")})

        self.finish(run, complete, 0 if row["status"] == "ok" else 1)

    def log_table(self, subject: TrackedRun, columns: Sequence[str], rows: Sequence[Values]) -> None:
        run = self.call_api(lambda: self.start(subject, "summary"))

        def complete() -> None:
            data = [[row.get(column) for column in columns] for row in rows]
            run.log({"runs": self.library.Table(columns=list(columns), data=data, allow_mixed_types=True)})
            statuses = [row["status"] for row in rows]
            run.summary.update({"rows": len(rows)} | {status: statuses.count(status) for status in set(statuses)})

        self.finish(run, complete, 0)

    def close(self) -> None:
        with suppress(Exception):  # there is no one left to tell
            for run in self.open.values():
                run.finish(exit_code=1)

    def start(self, subject: TrackedRun, job_type: str) -> Any:
        run = self.library.init(
            mode=self.config.mode,
            entity=self.config.entity,
            project=self.config.project,
            id=subject.id,
            group=subject.group,
            name=subject.name,
            job_type=job_type,
            tags=_tags(subject),
            dir=str(subject.folder),
            config=dict(subject.config),
            reinit="create_new",  # several at a time
            settings=self.settings(),
        )
        for values, axis in AXES.items():
            if axis is not None:
                run.define_metric(axis, summary="none", hidden=True)
            run.define_metric(values, step_metric=axis, summary="none")
        return run

    def settings(self) -> Any:
        """Bounded times, nothing on the terminal, and nothing gathered of machine, user, code or command line."""
        return self.library.Settings(
            init_timeout=self.seconds,
            finish_timeout=self.seconds,
            finish_timeout_raises=True,
            login_timeout=self.seconds,
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

    def finish(self, run: Any, complete: Callable[[], None], exit_code: int) -> None:
        """Raises Unreachable unless all of the run's values are where they should be."""
        try:
            self.call_api(complete)
        finally:
            self.call_api(lambda: run.finish(exit_code=exit_code))
        trouble = _fatal(Path(run.settings.log_internal))
        if trouble:
            raise TrackerUnavailable(f"W&B refused the data: {trouble}")

    def call_api(self, call: Callable[[], Any]) -> Any:
        """Whatever the library raises is W&B's trouble, not ours."""
        try:
            return call()
        except self.library.errors.UsageError as error:
            if "API key" not in str(error):
                raise TrackerUnavailable(f"W&B: {one_line(error)}") from None
            raise TrackerUnavailable("W&B has no key for its server: run `wandb login`, or set WANDB_API_KEY") from None
        except Exception as error:
            told = one_line(str(error).partition("\n")[0]) or type(error).__name__
            raise TrackerUnavailable(f"W&B: {told}") from None


# What a step's values are called, where it is not by their own names.
_NAMES = {"seconds": "step_seconds"}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _tags(subject: TrackedRun) -> tuple[str, ...]:
    return tuple(tag[:TAG_CHARACTERS] for tag in subject.tags)


def _fatal(log: Path) -> str:
    """Why W&B stopped sending a run, '' if it did not: finish() raises for time alone, its log has what is fatal."""
    with suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):
                said = json.loads(line)
                if str(said.get("level", "")).startswith("ERROR+"):  # beyond an error
                    return one_line(said.get("msg", ""))[:200]
    return ""
