"""The remedies for a run that does not fit: first those that keep the user's model, last a smaller one.

Imports no torch, and knows no engine: the caller says which changed configurations could be run.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.config.byte_size import format_bytes
from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionConfig
from harness.config.schema import RunConfig
from harness.config.strategy import StrategyConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import parameter_count
from harness.layout.state_widths import StateWidths

_MOST_DOUBLINGS = 12  # of the number of ranks

Change = tuple[str, RunConfig]  # what to type, and the configuration with it

RankBytesIfFitting = Callable[["Variant"], int | None]  # None if it does not fit


@dataclass(frozen=True)
class Variant:
    """A changed configuration that could be run, with its layout and what its engine allocates."""

    config: RunConfig
    layout: Layout
    widths: StateWidths


@dataclass(frozen=True)
class Choices:
    """What a remedy may choose from, and how a changed configuration is planned."""

    # Return the variant of a changed configuration, or None if it could not be run. The number of ranks is None where
    # the configuration or the machine decides it.
    plan: Callable[[RunConfig, int | None], Variant | None]
    models: Sequence[ModelConfig] = ()
    sharded: Sequence[StrategyConfig] = ()  # strategies that shard all model state over data-parallel ranks
    precisions: Sequence[PrecisionConfig] = ()  # narrower ones, the most accurate first
    local_ranks: int = 0  # the ranks that this machine has devices for
    offloads: bool = False  # whether the host has memory of its own


def remedies(config: RunConfig, layout: Layout, choices: Choices, fits: RankBytesIfFitting) -> Iterator[str]:
    """Yield what keeps the model and fits: one change, or where no single one is enough, several together."""

    def fitting(changes: Iterable[Change]) -> Iterator[str]:
        """Yield the changes with which the run could be started and would fit."""
        for text, changed in changes:
            variant = choices.plan(changed, _ranks(config, changed, layout))
            size = None if variant is None else fits(variant)
            if size is not None:
                yield f"{text} ({format_bytes(size)} a rank)"

    single = [*more_ranks(config, layout, choices, fits)]
    for step in STEPS:  # of several kinds of checkpointing both are worth knowing, of others the mildest
        single += itertools.islice(fitting(step(config, layout, choices)), 2 if step is checkpointing else 1)
    yield from single or _together(config, layout, choices, fits)


def _ranks(config: RunConfig, changed: RunConfig, layout: Layout) -> int | None:
    """Return the number of ranks of a changed configuration: another strategy has as many as the machine gives it."""
    return layout.world_size if changed.strategy.name == config.strategy.name else None


def _together(config: RunConfig, layout: Layout, choices: Choices, fits: RankBytesIfFitting) -> Iterator[str]:
    """Yield the first changes of STEPS, each as strong as possible, with which the run fits, perhaps on more ranks."""
    texts: list[str] = []
    current, current_layout = config, layout
    for step in STEPS:
        if step is offload:  # the last resort
            wider = [" ".join((*texts, text)) for text in more_ranks(current, current_layout, choices, fits)]
            if wider:
                yield from wider
                return
        for text, changed in reversed(list(step(current, layout, choices))):
            variant = choices.plan(changed, _ranks(config, changed, layout))
            if variant is None:
                continue
            texts.append(text)
            current, current_layout = changed, variant.layout
            size = fits(variant)
            if size is not None:
                yield f"{' '.join(texts)} ({format_bytes(size)} a rank)"
                return
            break


def more_ranks(config: RunConfig, layout: Layout, choices: Choices, fits: RankBytesIfFitting) -> Iterator[str]:
    """Yield the smallest larger number of ranks that fits, by doubling, on hosts or devices like this one."""
    if layout.world_size == 1 or (layout.axes_size(("tp", "pp")) == 1 and layout.zero_stage == 0):
        return
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        world_size = layout.world_size * 2**doublings
        per_pass = config.train.micro_batch * layout.dp * (2**doublings if layout.dp_enabled else 1)
        batch = -(-config.train.global_batch // per_pass) * per_pass
        changed = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))
        variant = choices.plan(changed, world_size)
        size = None if variant is None else fits(variant)
        if size is not None:
            more = "" if batch == config.train.global_batch else f" and train.global_batch={batch}"
            where = "" if world_size <= choices.local_ranks else " on more such machines"
            yield f"world_size={world_size}{more}{where} ({format_bytes(size)} a rank)"
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


def smaller_model(config: RunConfig, layout: Layout, choices: Choices, fits: RankBytesIfFitting) -> Iterator[str]:
    """Yield the largest smaller model of the family that fits with the same layout, batch and attention."""
    family = [model for model in choices.models if model.family == config.model.family]
    smaller = [model for model in family if parameter_count(model) < parameter_count(config.model)]
    for model in sorted(smaller, key=parameter_count, reverse=True):
        changed = dataclasses.replace(config, model=dataclasses.replace(model, attention=config.model.attention))
        variant = choices.plan(changed, layout.world_size)
        size = None if variant is None else fits(variant)
        if size is not None:
            yield f"model={model.name} ({format_bytes(size)} a rank)"
            return
