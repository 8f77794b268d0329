"""Experiment tracking, fed by the parent from the record; another tracker is another class here."""

import json
import os
from pathlib import Path
from typing import Any, Literal, Protocol

from harness.config import TrackingConfig
from harness.records import Record
from harness.typed import from_dict

INIT_SECONDS = 15.0  # after which an unreachable server is given up and the run kept offline


class Tracker(Protocol):
    def __init__(self, config: TrackingConfig) -> None: ...

    def log(self, run_dir: Path, record: Record) -> str | None:
        """Hands over a finished run; a word if that was not possible as asked. Never raises for a network's sake."""
        ...


def tracker(values: dict[str, Any]) -> Tracker:
    """The tracker of a configuration's `tracking` group. Raises UserError for one that is not known."""
    config: TrackingConfig = from_dict(TrackingConfig, values, "tracking")
    known: dict[str, type[Tracker]] = {"none": Nothing, "wandb": WandB}
    return known[config.name](config)


class Nothing:
    def __init__(self, config: TrackingConfig) -> None:
        pass

    def log(self, run_dir: Path, record: Record) -> str | None:
        return None


class WandB:
    """Weights & Biases: a run a record, grouped by comparison; offline files stay in the run's folder."""

    def __init__(self, config: TrackingConfig) -> None:
        self.config = config

    def log(self, run_dir: Path, record: Record) -> str | None:
        if (run_dir / "wandb").exists() or not run_dir.is_dir():
            return None  # a record that was not run again was logged when it was
        if self.config.mode == "offline":
            self.write("offline", run_dir, record)
            return None
        try:
            self.write("online", run_dir, record)
            return None
        except Exception as error:  # whatever the network or the key did, the data must not be lost
            self.write("offline", run_dir, record)
            return f"W&B online failed ({type(error).__name__}), kept offline in {run_dir}"

    def write(self, mode: Literal["offline", "online"], run_dir: Path, record: Record) -> None:
        import wandb

        row = record["row"]
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        settings = wandb.Settings(init_timeout=INIT_SECONDS, silent=True, console="off", x_disable_stats=True)
        run = wandb.init(
            mode=mode,
            project=self.config.project,
            group=row["name"],
            name=row["run_id"],
            tags=[row["strategy"], row["model"], row["status"]],
            dir=str(run_dir),
            config=record["config"],
            settings=settings,
        )
        for step in read_steps(run_dir):
            index = step.pop("step")
            run.log({key: value for key, value in step.items() if isinstance(value, (int, float))}, step=index)
        run.summary.update({key: value for key, value in row.items() if value is not None})
        run.finish(exit_code=0 if row["status"] == "ok" else 1)


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
