"""Whether a rank fits the memory that there is, how sure that is, and what would make one fit. Imports no torch.

Runs ask it of the memory that is free, and are refused with the arithmetic and the remedies; plans ask it of a device's
memory, and say by the errors of predictions on file how sure it is. A remedy keeps the user's model if any does, and
knows no engine: the caller says which changed configurations could be run.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.config.byte_size import format_bytes
from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackMemory
from harness.config.strategy import StrategyConfig
from harness.cost_model.memory import PROCESS_BYTES, MemoryEstimate
from harness.cost_model.stack_memory import RankMemory
from harness.layout.layout import Layout
from harness.layout.model_profile import parameter_count

Fits = Literal["likely", "tight", "no"]
Change = tuple[str, RunConfig]  # what to type, and the configuration with it

# The range of measured over predicted bytes of a stack without measurements of its own: that of the least predictable
# one, nanotron's.
UNMEASURED_RANGE = (0.84, 1.45)
MIN_REPORTED_SHARE = 0.005  # of a rank's bytes: the message leaves out smaller parts
MOST_DOUBLINGS = 12  # of the number of ranks


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
    back segments that nothing fills before it runs out, and `likely` if the upper end of what is reserved does not.
    The CUDA context takes its part of the device.
    """
    low, high = stack.measured_over_predicted or UNMEASURED_RANGE
    low_bytes = max(memory.estimate.peak_bytes * low, float(memory.resting_bytes))
    high_bytes = memory.reserved_bytes * high
    available = capacity_bytes - memory.estimate.process_bytes
    fits: Fits = "no" if low_bytes > available else "likely" if high_bytes <= available else "tight"
    return FitVerdict(fits, low_bytes, high_bytes)


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

    def fitting(self, changed: RunConfig, ranks: int | None) -> str | None:
        """Return the bytes of a rank of a changed configuration in words; None if it could not be run, or not fit."""
        return self.size_text(self.plan(changed, ranks))

    def size_text(self, variant: Variant | None) -> str | None:
        """Return the bytes of a rank in words; None if there is no such run, or if it does not fit."""
        if variant is None or not variant.room.holds(variant.memory):
            return None
        return f"({format_bytes(variant.memory.peak_bytes + self.process_bytes)} a rank)"


def remedies(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield what keeps the model and fits: one change, or where no single one is enough, several together."""
    single = [*more_ranks(config, layout, choices)]
    for step in STEPS:  # of several kinds of checkpointing both are worth knowing, of others the mildest
        sized = (
            (text, choices.fitting(changed, _ranks(config, changed, layout)))
            for text, changed in step(config, layout, choices)
        )
        fitting = (f"{text} {size}" for text, size in sized if size)
        single += itertools.islice(fitting, 2 if step is checkpointing else 1)
    yield from single or _together(config, layout, choices)


def _ranks(config: RunConfig, changed: RunConfig, layout: Layout) -> int | None:
    """Return the number of ranks of a changed configuration: another strategy has as many as the machine gives it."""
    return layout.world_size if changed.strategy.name == config.strategy.name else None


def _together(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield the first changes of STEPS, each as strong as possible, with which the run fits, perhaps on more ranks."""
    texts: list[str] = []
    current, current_layout = config, layout
    for step in STEPS:
        if step is offload:  # the last resort
            wider = [" ".join((*texts, text)) for text in more_ranks(current, current_layout, choices)]
            if wider:
                yield from wider
                return
        for text, changed in reversed(list(step(current, layout, choices))):
            variant = choices.plan(changed, _ranks(config, changed, layout))
            if variant is None:
                continue
            texts.append(text)
            current, current_layout = changed, variant.layout
            if size := choices.size_text(variant):
                yield f"{' '.join(texts)} {size}"
                return
            break


def more_ranks(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield the smallest larger number of ranks that fits, by doubling, on hosts or devices like this one."""
    if layout.world_size == 1 or (layout.axes_size(("tp", "pp")) == 1 and layout.zero_stage == 0):
        return
    for doublings in range(1, MOST_DOUBLINGS + 1):
        world_size = layout.world_size * 2**doublings
        per_pass = config.train.micro_batch * layout.dp * (2**doublings if layout.dp_enabled else 1)
        batch = -(-config.train.global_batch // per_pass) * per_pass
        changed = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))
        if size := choices.fitting(changed, world_size):
            more = "" if batch == config.train.global_batch else f" and train.global_batch={batch}"
            where = "" if world_size <= choices.local_ranks else " on more such machines"
            yield f"world_size={world_size}{more}{where} {size}"
            return


def sharding(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[Change]:
    """Yield the strategies that shard all model state over ranks that do not divide matrices or layers."""
    if layout.axes_size(("tp", "pp")) > 1 or layout.zero_stage == 3 or config.strategy.offload != "none":
        return
    if layout.cp_enabled:
        strategy = dataclasses.replace(config.strategy, data_parallel="fsdp", zero_stage=3)
        yield "strategy.data_parallel=fsdp strategy.zero_stage=3", dataclasses.replace(config, strategy=strategy)
        return
    for strategy in choices.sharded:
        yield f"strategy={strategy.name}", dataclasses.replace(config, strategy=strategy)


def narrower(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[Change]:
    """Yield the precisions of fewer bits."""
    for precision in choices.precisions:
        if precision.compute_bytes < config.precision.compute_bytes:
            yield f"precision={precision.name}", dataclasses.replace(config, precision=precision)


def checkpointing(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[Change]:
    """Yield the checkpointing that recomputes little, or more where that is chosen, and the one that keeps least."""
    if config.checkpointing == CheckpointingConfig("selective"):
        changed = dataclasses.replace(config.checkpointing, saved_products="every_second")
        yield "checkpointing.saved_products=every_second", dataclasses.replace(config, checkpointing=changed)
    for name in ("selective", "full"):
        if config.checkpointing.name not in (name, "full"):
            changed = dataclasses.replace(config.checkpointing, name=name, every=1, saved_products="all")
            yield f"checkpointing={name}", dataclasses.replace(config, checkpointing=changed)


def smaller_micro_batch(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[Change]:
    """Yield half the micro-batch, and single sequences."""
    size = config.train.micro_batch
    for smaller in dict.fromkeys((size // 2, 1)):
        if smaller and smaller < size and size % smaller == 0:
            train = dataclasses.replace(config.train, micro_batch=smaller)
            yield f"train.micro_batch={smaller}", dataclasses.replace(config, train=train)


def offload(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[Change]:
    """Yield the model state that the host can hold."""
    if choices.offloads and config.strategy.offload == "none":
        for kind in ("optimizer", "parameters"):
            strategy = dataclasses.replace(config.strategy, offload=kind)
            yield f"strategy.offload={kind}", dataclasses.replace(config, strategy=strategy)


STEPS: tuple[Callable[[RunConfig, Layout, Choices], Iterator[Change]], ...] = (
    sharding,
    narrower,
    checkpointing,
    smaller_micro_batch,
    offload,
)


def smaller_model(config: RunConfig, layout: Layout, choices: Choices) -> Iterator[str]:
    """Yield the largest smaller model of the family that fits with the same layout, batch and attention."""
    family = [model for model in choices.models if model.family == config.model.family]
    smaller = [model for model in family if parameter_count(model) < parameter_count(config.model)]
    for model in sorted(smaller, key=parameter_count, reverse=True):
        changed = dataclasses.replace(config, model=dataclasses.replace(model, attention=config.model.attention))
        if size := choices.fitting(changed, layout.world_size):
            yield f"model={model.name} {size}"
            return


def memory_problem(
    config: RunConfig, layout: Layout, memory: MemoryEstimate, room: Room, choices: Choices
) -> str | None:
    """Return why a run of this memory cannot fit, in one line with its arithmetic and what would; None if it fits.

    What the message offers is one of `choices` and fits.
    """
    if room.holds(memory):
        return None
    if not room.host_holds(memory):
        return host_problem(config, memory, room)
    fits_device = room.device_holds(memory)
    offers = list(remedies(config, layout, choices))
    offers += ["a larger cluster.memory_budget"] if fits_device else []
    offers += ["preflight=false to try", *smaller_model(config, layout, choices)]
    rank_bytes = memory.peak_bytes + choices.process_bytes
    needs = f"model={config.model.name} needs {format_bytes(rank_bytes)} a rank"
    if fits_device:
        limit = f"cluster.memory_budget={config.cluster.memory_budget} is less"
    else:
        limit = f"{format_bytes(room.bytes)} are available"
        if room.is_shared and room.ranks > 1:
            needs += f" x {room.ranks} ranks on one host = {format_bytes(rank_bytes * room.ranks)}"
    parts = {**memory.at_peak, "process": choices.process_bytes}
    arithmetic = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in parts.items() if size >= MIN_REPORTED_SHARE * rank_bytes
    )
    return f"{needs} ({arithmetic}), {limit}: choose {', or '.join(offers)}"


def host_problem(config: RunConfig, memory: MemoryEstimate, room: Room) -> str:
    """Return why offloaded tensors do not fit the host beside its ranks' processes."""
    keys = [f"strategy.offload={config.strategy.offload}"] if config.strategy.offload != "none" else []
    keys += ["checkpointing.offload_activations=true"] if config.checkpointing.offload_activations else []
    needed = room.offload_bytes(memory)
    return (
        f"{' and '.join(keys)} of model={config.model.name} {'needs' if len(keys) == 1 else 'need'}"
        f" {format_bytes(needed // room.ranks)} a rank x {room.ranks} ranks of the host ="
        f" {format_bytes(needed)}, {format_bytes(room.host_bytes or 0)} are available:"
        " choose less offload, preflight=false to try, or a smaller model"
    )
