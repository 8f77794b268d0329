"""How a command goes about its runs, and the one place where a composed configuration is split into its two halves.

Nothing here changes what a run measures, so nothing here is part of a run's identity.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.config.from_dict import from_dict
from harness.config.schema import RunConfig
from harness.config.validation import require, require_one_of
from harness.util.errors import UserError

RetryableStatus = Literal["error", "timeout", "oom"]  # what was interrupted is always run again


@dataclass(frozen=True)
class ProofConfig:
    """The bounds that every run must keep; a run above one of them is an error."""

    reference: bool = True  # whether every run is compared with a single process that trains the same
    loss_bound: dict[str, float] = field(default_factory=dict)  # relative, by precision
    grad_bound: dict[str, float] = field(default_factory=dict)  # relative, by precision


@dataclass(frozen=True)
class MeasureConfig:
    """What a run writes down beside its record."""

    memory_snapshot: bool = False  # of every rank's profiled step, for torch's memory viewer


@dataclass(frozen=True)
class SweepConfig:
    """How one command works through its runs."""

    parallel: int | str = 1  # runs side by side, each on devices or cores of its own; auto: as many as have devices
    skip_dominated: bool = True  # whether what ran out of memory at a smaller batch or depth is not tried at a larger

    def __post_init__(self) -> None:
        is_number = isinstance(self.parallel, int) and self.parallel >= 1
        rule = "is not a number of runs: choose auto, or 1 or more"
        require(is_number or self.parallel == "auto", "sweep.parallel", self.parallel, rule)


@dataclass(frozen=True)
class TrackingConfig:
    """Where runs are tracked. Whether there is a tracker of that name is for the command line to check."""

    name: str
    mode: str = "offline"  # offline or online
    project: str = "harness"
    entity: str | None = None  # user or team; null: the account's own default
    tags: tuple[str, ...] = ()  # of every run, beside those that say what it is

    def __post_init__(self) -> None:
        require_one_of("tracking.mode", self.mode, ("offline", "online"))


def _between_attempts(default: Any) -> Any:
    """Return a field that may change from one attempt at a combination to the next.

    A combination of which no configuration can be made has its row under the hash of all other values, as any of
    them may be the impossible one (harness.runner.rejected).
    """
    return field(default=default, metadata={"names_rejected": False})


@dataclass(frozen=True)
class CommandConfig:
    """How a command goes about its runs: where results go, what is retried, when it stops."""

    name: str = "runs"  # of the comparison: the folder in results_dir
    results_dir: str = "results"
    proof: ProofConfig = field(default_factory=ProofConfig)
    tracking: TrackingConfig = field(default_factory=lambda: TrackingConfig("none"))
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig, metadata={"names_rejected": False})
    repeats: int = 1  # runs of one configuration, from RunConfig.repeat on; each of them is a run of its own
    timeout_seconds: float = 1800.0
    hang_seconds: float = 600.0  # without progress of any rank
    preflight: bool = True  # whether what cannot fit is refused before a process starts
    retry: tuple[RetryableStatus, ...] = _between_attempts(())  # runs that ended so are run again
    stop_after: tuple[str | int | float, ...] = _between_attempts(())  # 8h, 20runs, 3failures: no run starts then
    force: bool = _between_attempts(False)  # whether what is recorded is run again

    def __post_init__(self) -> None:
        require(self.repeats >= 1, "repeats", self.repeats, "is not a positive whole number: choose 1 or more")
        for key in ("timeout_seconds", "hang_seconds"):
            require(getattr(self, key) > 0, key, getattr(self, key), "is not positive: choose seconds")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration in plain values."""
        return dataclasses.asdict(self)


RUN_KEYS = tuple(entry.name for entry in dataclasses.fields(RunConfig))

COMMAND_KEYS = tuple(entry.name for entry in dataclasses.fields(CommandConfig))

# Command keys that leave the name of a rejected combination's row as it is.
BETWEEN_ATTEMPTS = tuple(
    e.name for e in dataclasses.fields(CommandConfig) if not e.metadata.get("names_rejected", True)
)


def split_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a RunConfig and those of a CommandConfig, by the names of their fields.

    Older records may have `launch=script`, a batch script to submit by hand: their ranks were processes.
    Raises UserError for a key that belongs to neither.
    """
    known = (*COMMAND_KEYS, *RUN_KEYS)
    for unknown in sorted(values.keys() - set(known)):
        raise UserError(f"{unknown} is not a key: choose one of {', '.join(known)}")
    run = {key: value for key, value in values.items() if key in RUN_KEYS}
    if run.get("launch") == "script":
        run["launch"] = "processes"
    return run, {key: value for key, value in values.items() if key in COMMAND_KEYS}


def read_run_config(values: Mapping[str, Any]) -> RunConfig:
    """Return what is measured, from values composed or recorded. Raises UserError."""
    config: RunConfig = from_dict(RunConfig, split_values(values)[0])
    return config


def read_command_config(values: Mapping[str, Any]) -> CommandConfig:
    """Return how the command goes about it, from values composed or recorded. Raises UserError."""
    command: CommandConfig = from_dict(CommandConfig, split_values(values)[1])
    return command


def merge_values(config: RunConfig, command: CommandConfig) -> dict[str, Any]:
    """Return both halves as one dictionary of plain values, as a record and a tracker have them."""
    return command.to_dict() | config.to_dict()
