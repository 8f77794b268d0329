"""Whether a rank fits the memory that there is, how sure that is, and what would make one fit. Imports no torch.

Runs ask it of the memory that is free, and are refused with the arithmetic and the remedies; plans ask it of a device's
memory, and say by the errors of predictions on file how sure it is. A remedy keeps the user's model if any does, and
knows no engine: the caller says which changed configurations could be run.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.config.model import ModelConfig
from harness.config.schema import Checkpointing, CheckpointingConfig, PrecisionConfig, RunConfig
from harness.config.stack import StackMemory
from harness.config.strategy import StrategyConfig
from harness.cost_model.memory import PROCESS_BYTES, MemoryEstimate
from harness.cost_model.stack_memory import RankMemory
from harness.layout.layout import Layout
from harness.layout.model_profile import parameter_count
from harness.util.sentences import Sentences
from harness.util.text import format_bytes

# What sentences.j2 says of a layout: its name, and why it does not fit.
say = Sentences(Path(__file__).with_name("sentences.j2"), {"bytes": format_bytes})

Fits = Literal["likely", "tight", "no"]
Settings = Mapping[str, Any]  # by what to type: a dotted key, or a group for all of its values

# The range of measured over predicted bytes of a stack without measurements of its own: that of the least predictable
# one, nanotron's.
UNMEASURED_RANGE = (0.84, 1.45)
MIN_REPORTED_SHARE = 0.005  # of a rank's bytes: the message leaves out smaller parts
MOST_DOUBLINGS = 12  # of the number of ranks
RECOMPUTING: tuple[Checkpointing, ...] = ("selective", "full")  # the checkpointing that recomputes little, and most


@dataclass(frozen=True)
class Room:
    """The memory that the ranks of a host may fill: a device's for each of them, or the host's for all together."""

    bytes: int  # of a device, or of the host where ranks share it
    ranks: int = 1  # of the host
    is_shared: bool = False  # as on a CPU
    budget_bytes: int | None = None  # of a rank's tensors, which are all that a budget counts
    host_bytes: int | None = None  # of the host, for what its ranks offload and for their processes; None: unknown

    def holds(self, memory: MemoryEstimate) -> bool:
        """Return whether ranks of this memory fit."""
        fits_budget = self.budget_bytes is None or memory.peak_bytes <= self.budget_bytes
        return fits_budget and self.device_holds(memory) and self.host_holds(memory)

    def device_holds(self, memory: MemoryEstimate) -> bool:
        """Return whether the device, or the host that is one, has the bytes, whatever the budget is."""
        return memory.needed_bytes * (self.ranks if self.is_shared else 1) <= self.bytes

    def host_holds(self, memory: MemoryEstimate) -> bool:
        """Return whether offloaded tensors, which cannot be paged out, fit the host, as far as that is known."""
        return not memory.host_bytes or self.host_bytes is None or self.offload_bytes(memory) <= self.host_bytes

    def offload_bytes(self, memory: MemoryEstimate) -> int:
        """Return the bytes of the host that offloaded tensors take beside the processes of its ranks."""
        return (memory.host_bytes + PROCESS_BYTES["cpu"]) * self.ranks


@dataclass(frozen=True)
class FitVerdict:
    """A verdict and the range of bytes that it follows from."""

    fits: Fits
    low_bytes: float
    high_bytes: float


def fit_verdict(memory: RankMemory, capacity_bytes: float, stack: StackMemory) -> FitVerdict:
    """Return whether a rank fits a device of this memory.

    It is `no` if model state, or the lower end of what is allocated at the peak, exceeds the device, since torch gives
    back segments that nothing fills before it runs out. It is `likely` if the upper end of what a device must have does
    not. State is counted to the byte, so that no error on file makes the lower end smaller than what is there at once.
    The CUDA context takes its part of the device.
    """
    low, high = stack.measured_over_predicted or UNMEASURED_RANGE
    low_bytes = float(max(memory.estimate.peak_bytes * low, memory.resting_bytes, memory.estimate.state_at_peak_bytes))
    high_bytes = memory.served_bytes * high
    available = capacity_bytes - memory.estimate.process_bytes
    possible: Fits = "likely" if high_bytes <= available else "tight"
    return FitVerdict("no" if low_bytes > available else possible, low_bytes, high_bytes)


@dataclass(frozen=True)
class Variant:
    """The layout and the memory of a changed configuration that could be run, and the room that there is for it."""

    layout: Layout
    memory: MemoryEstimate
    room: Room


@dataclass(frozen=True)
class Choices:
    """What a remedy may choose from, and how a changed configuration is planned."""

    # Return the variant of a changed configuration, or None if it could not be run. The number of ranks is None where
    # the configuration or the machine decides it.
    plan: Callable[[RunConfig, int | None], Variant | None]
    process_bytes: int  # that a rank's are stated with; none where a budget is at fault, which is of tensors alone
    models: Sequence[ModelConfig] = ()
    sharded: Sequence[StrategyConfig] = ()  # strategies that shard all model state over data-parallel ranks
    precisions: Sequence[PrecisionConfig] = ()  # narrower ones, the most accurate first
    local_ranks: int = 0  # the ranks that this machine has devices for
    offloads: bool = False  # whether the host has memory of its own

    def variant(self, config: RunConfig, layout: Layout, settings: Settings) -> Variant | None:
        """Return a configuration with other settings as it would be run.

        Another strategy has as many ranks as the machine gives it.
        """
        is_same_strategy = settings.get("strategy", config.strategy).name == config.strategy.name
        return self.plan(changed(config, settings), layout.world_size if is_same_strategy else None)

    def offers(self, text: str, variant: Variant | None) -> Iterator[str]:
        """Yield what to type for a variant with the bytes of a rank, if it could be run and fits."""
        if variant is not None and variant.room.holds(variant.memory):
            yield say("offer", text=text, size=variant.memory.peak_bytes + self.process_bytes)


def changed(config: RunConfig, settings: Settings) -> RunConfig:
    """Return the configuration with other settings."""
    for key, value in settings.items():
        group, _, name = key.partition(".")
        values = dataclasses.replace(getattr(config, group), **{name: value}) if name else value
        config = dataclasses.replace(config, **{group: values})
    return config


def typed(settings: Settings) -> str:
    """Return settings as they are typed: a group by the name of its values."""
    return " ".join(f"{key}={getattr(value, 'name', value)}" for key, value in settings.items())


def remedies(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield what keeps the model and fits: one change, or where no single one is enough, several together."""
    single = [*itertools.islice(more_ranks(config, layout, choices), 1)]
    for kind, changes in less_memory(config, layout, choices).items():
        fitting = (
            offer
            for settings in changes
            for offer in choices.offers(typed(settings), choices.variant(config, layout, settings))
        )
        # Of several kinds of checkpointing both are worth knowing, of others the mildest.
        single += itertools.islice(fitting, 2 if kind == "checkpointing" else 1)
    yield from single or itertools.islice(_together(config, layout, choices), 1)


def _together(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield changes, each as strong as possible, with which the run fits: the fewest first, perhaps on more ranks."""
    settings: Settings = {}
    current, current_layout = config, layout
    for kind in less_memory(config, layout, choices):
        if kind == "offload":  # the last resort
            yield from (f"{typed(settings)} {text}" for text in more_ranks(current, current_layout, choices))
        changes = [{**settings, **change} for change in reversed(less_memory(current, layout, choices)[kind])]
        variants = ((choices.variant(config, layout, change), change) for change in changes)
        variant, settings = next((variant for variant in variants if variant[0]), (None, settings))
        if variant is not None:
            current, current_layout = changed(config, settings), variant.layout
            yield from choices.offers(typed(settings), variant)


def more_ranks(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield larger numbers of ranks that fit, by doubling, on hosts or devices like this one."""
    if layout.world_size == 1 or (layout.axes_size(("tp", "pp")) == 1 and layout.zero_stage == 0):
        return
    for factor in (2**doublings for doublings in range(1, MOST_DOUBLINGS + 1)):
        world_size = layout.world_size * factor
        per_pass = config.train.micro_batch * layout.dp * (factor if layout.dp_enabled else 1)
        batch = -(-config.train.global_batch // per_pass) * per_pass
        other_batch = batch if batch != config.train.global_batch else 0
        text = say("more_ranks", world_size=world_size, batch=other_batch, is_here=world_size <= choices.local_ranks)
        yield from choices.offers(text, choices.plan(changed(config, {"train.global_batch": batch}), world_size))


def less_memory(config: RunConfig, layout: Layout, choices: Choices) -> dict[str, list[Settings]]:
    """Return what keeps the model and needs less memory, by kind; in each kind the mildest change comes first.

    Strategies that shard all model state are for ranks that do not divide matrices or layers.
    """
    checkpointing, size, offload = config.checkpointing, config.train.micro_batch, config.strategy.offload
    is_divided = layout.axes_size(("tp", "pp")) > 1 or layout.zero_stage == 3 or offload != "none"
    by_strategy: list[Settings] = [{"strategy": strategy} for strategy in choices.sharded]
    with_cp: list[Settings] = [{"strategy.data_parallel": "fsdp", "strategy.zero_stage": 3}]
    return {
        "sharding": (with_cp if layout.cp_enabled else by_strategy) * (not is_divided),
        "precision": [
            {"precision": precision}
            for precision in choices.precisions
            if precision.compute_bytes < config.precision.compute_bytes
        ],
        "checkpointing": [
            *[{"checkpointing.saved_products": "every_second"}] * (checkpointing == CheckpointingConfig("selective")),
            *[
                {"checkpointing": dataclasses.replace(checkpointing, name=name, every=1, saved_products="all")}
                for name in RECOMPUTING
                if checkpointing.name not in (name, "full")
            ],
        ],
        "micro_batch": [
            {"train.micro_batch": smaller}
            for smaller in dict.fromkeys((size // 2, 1))
            if 0 < smaller < size and size % smaller == 0
        ],
        "offload": [
            {"strategy.offload": state}
            for state in ("optimizer", "parameters")
            if choices.offloads and offload == "none"
        ],
    }


def smaller_model(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield the smaller models of the family that fit with the same layout, batch and attention, the largest first."""
    family = (model for model in choices.models if model.family == config.model.family)
    for model in sorted(family, key=parameter_count, reverse=True):
        if parameter_count(model) < parameter_count(config.model):
            settings = {"model": dataclasses.replace(model, attention=config.model.attention)}
            yield from choices.offers(typed(settings), choices.variant(config, layout, settings))


def memory_problem(
    config: RunConfig, layout: Layout, memory: MemoryEstimate, room: Room, choices: Choices
) -> str | None:
    """Return why a run of this memory cannot fit, in one line with its arithmetic and what would; None if it fits.

    What the message offers is one of `choices` and fits.
    """
    if room.holds(memory):
        return None
    if not room.host_holds(memory):
        return say("host_problem", config=config, room=room, size=room.offload_bytes(memory))
    size = memory.peak_bytes + choices.process_bytes
    parts = {**memory.at_peak, "process": choices.process_bytes}
    return say(
        "memory_problem",
        config=config,
        room=room,
        size=size,
        parts={name: part for name, part in parts.items() if part >= MIN_REPORTED_SHARE * size},
        fits_device=room.device_holds(memory),
        offers=list(remedies(config, layout, choices)),
        smaller=list(itertools.islice(smaller_model(config, layout, choices), 1)),
    )
