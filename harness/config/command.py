"""The configuration of how a command executes its runs, and the split of a composed configuration into its halves.

Nothing here changes what a run measures, so nothing here is part of a run's identity.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from harness.config.from_dict import ConfigValues, Positive, from_dict, one_of, rule
from harness.config.hardware import AboveZero
from harness.config.schema import RunConfig
from harness.util.text import UserError

RetryableStatus = Literal["error", "timeout", "oom"]  # interrupted runs are always run again
NoiseFloors = Annotated[
    float, rule(lambda value: value >= 1, "is not 1 or more: choose a number of noise floors, such as 10")
]
Parallel = Annotated[
    int | str,
    rule(
        lambda value: value == "auto" or (isinstance(value, int) and value >= 1),
        "is not a number of runs: choose auto, or 1 or more",
    ),
]
Top = Annotated[int, rule(lambda value: value >= 1, "is not a number of configurations: choose 1 or more, or null")]
TrackingMode = Annotated[str, one_of("offline", "online")]
Seconds = Annotated[float, rule(lambda value: value > 0, "is not positive: choose seconds")]
NAME_RULE = "cannot name a folder of results: choose letters, digits, '.', '_' and '-', first a letter or digit"
Pause = Annotated[float, rule(lambda value: value >= 0, "is negative: choose 0 or more seconds")]
Retries = Annotated[int, rule(lambda value: value >= 0, "is negative: choose 0 or more")]


@dataclass(frozen=True)
class ProofConfig:
    """The bounds that every run must meet; a run above one of them is an error."""

    reference: bool = True  # Whether every run is compared with one that trains the same, if possible a single process.
    # How many times as far from the reference a run may be as the reference's second training, which differs in
    # rounding only.
    floor_multiple: NoiseFloors = 10.0


@dataclass(frozen=True)
class MeasureConfig:
    """The files that a run writes beside its record."""

    # Whether every rank writes the allocations of its profiled step, for torch's memory viewer.
    memory_snapshot: bool = False


@dataclass(frozen=True)
class SweepConfig:
    """The configuration of a sweep: how many runs execute at the same time, and which of them are skipped."""

    # The number of runs at the same time, each on its own devices or cores; auto runs as many as have devices.
    parallel: Parallel = 1
    # Whether a run is refused that is at least as large as one that has run out of memory, in batch or depth.
    skip_dominated: bool = True


@dataclass(frozen=True)
class PlanConfig:
    """The configuration of what commands do with predictions, for which the machine has to be described."""

    # Whether `harness plan` simulates layouts whose prediction leaves open whether they fit, the fastest first.
    simulate: bool = True
    # The tokens of the whole training, such as 1e12, whose time and price a plan names; null means a billion.
    tokens: AboveZero | None = None

    # The number of configurations that a sweep measures, those with the best predicted speed; null means all.
    top: Top | None = None
    # Whether a sweep says how much slower than its best the predicted winner was; without plan.top it measures all.
    validate: bool = False

    @property
    def needs_predictions(self) -> bool:
        """Whether a sweep takes its order from predictions."""
        return self.top is not None or self.validate


@dataclass(frozen=True)
class TrackingConfig:
    """The tracker of a command's runs; the command line checks whether there is a tracker of that name."""

    name: str  # The name of the tracker.
    mode: TrackingMode = "offline"  # Whether runs are only written into their folders (offline) or also sent (online).
    project: str = "harness"  # The project of the tracker that has the runs.
    entity: str | None = None  # The user or team; null means the account's default.
    # Where the tracker has its runs, if it can have them in several places: MLflow's tracking URI, or the folder of
    # TensorBoard's files. Null means what the tracker's own variables say, or beside the runs.
    uri: str | None = None
    # Tags of every run, besides strategy, model, checkpointing, precision and status.
    tags: tuple[str, ...] = ()
    # Settings of the tracker's own, which only the tracker knows; each is tracking.options.KEY=VALUE.
    options: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class CommandConfig:
    """The configuration of a command: where its results go, which runs it repeats, and when it stops."""

    name: str = "runs"  # The name of the comparison, which is its folder in results_dir.
    results_dir: str = "results"  # The folder of all comparisons.
    proof: ProofConfig = ProofConfig()
    tracking: TrackingConfig = TrackingConfig("none")
    measure: MeasureConfig = MeasureConfig()
    sweep: SweepConfig = SweepConfig()
    plan: PlanConfig = PlanConfig()
    repeats: Positive = 1  # How many times each configuration is measured, numbered from `repeat` on.
    timeout_seconds: Seconds = 1800.0  # The time limit of one run in seconds, from the start of its ranks.
    hang_seconds: Seconds = 600.0  # The seconds without progress of any rank after which a run has failed.
    preflight: bool = True  # Whether a run that is predicted not to fit into memory is refused before a process starts.
    # How often a command runs again what ended from outside: a killed process, a lost node, preemption.
    retries: Retries = 1
    retry_pause_seconds: Pause = 30.0  # The pause in seconds before it does so, in which other runs start.
    # The statuses whose runs are run again: error, timeout, oom; interrupted runs always are.
    retry: tuple[RetryableStatus, ...] = ()
    # The limits after which no further run starts, such as 8h, 20runs or 3failures.
    stop_after: tuple[str | int | float, ...] = ()
    # The command line that makes the runs, which the harness records itself; results_dir is left out.
    command_line: str = ""
    force: bool = False  # Whether runs that are already recorded are run again.


RUN_KEYS = tuple(entry.name for entry in dataclasses.fields(RunConfig))

COMMAND_KEYS = tuple(entry.name for entry in dataclasses.fields(CommandConfig))

# Command keys that may change from one attempt at a combination to the next. The row of a combination that is no valid
# configuration is named by the hash of all other values, because any of them may be the invalid one.
BETWEEN_ATTEMPTS = ("sweep", "plan", "retries", "retry_pause_seconds", "retry", "stop_after", "force", "command_line")


def split_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a RunConfig and those of a CommandConfig, by the names of their fields.

    Older records may have `launch=script`, which wrote a batch script to submit by hand: their ranks were processes.
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
    """Return the configuration of what is measured, from composed or recorded values. Raises UserError."""
    return from_dict(RunConfig, split_values(values)[0])


def read_command_config(values: Mapping[str, Any]) -> CommandConfig:
    """Return the configuration of the command, from composed or recorded values. Raises UserError."""
    return from_dict(CommandConfig, split_values(values)[1])


def merge_values(config: RunConfig, command: CommandConfig) -> ConfigValues:
    """Return both halves as one configuration in plain values, as a record and a tracker store it."""
    return dataclasses.asdict(command) | config.to_dict()
