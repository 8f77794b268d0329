"""Whether a run fits a machine, and what would: the arithmetic behind a refusal. Imports no torch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from harness.config.byte_size import format_bytes
from harness.config.schema import ModelConfig, RunConfig
from harness.cost_model.memory import PROCESS_BYTES, MemoryEstimate, estimate
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from harness.layout.parameters import parameter_count
from harness.layout.state_widths import StateWidths

MIN_REPORTED_SHARE = 0.005  # of what is needed: a smaller part is left out of the arithmetic

Accepts = Callable[[RunConfig, Layout], bool]  # whether a changed configuration could be run as that layout


def is_compatible(config: RunConfig, layout: Layout) -> bool:
    """Whether no rule that holds for every engine is broken."""
    return not any(incompatibilities(config, layout))


def needed_bytes(found: MemoryEstimate, ranks_on_host: int, device: str) -> int:
    """What must be there: a host's ranks share its memory, a CUDA device has one rank."""
    return (found.peak_bytes + found.process_bytes) * (ranks_on_host if device == "cpu" else 1)


def capacity_problem(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    *,
    available_bytes: int,
    ranks_on_host: int,
    device: str,
    models: Sequence[ModelConfig],
    host_available_bytes: int | None = None,
    accepts: Accepts = is_compatible,
) -> str | None:
    """Why the run cannot fit, in one line with its arithmetic and what would fit; None if it fits.

    available_bytes is the host's free memory on cpu (shared by ranks_on_host), one device's on cuda, where what is
    offloaded must fit host_available_bytes (None: unknown). A rank must fit cluster.memory_budget too. `models` are the
    candidates for a smaller choice; what is offered must be accepted as well as fit.
    """
    found = estimate(config, layout, widths, device)
    too_much = host_capacity_problem(config, found, ranks_on_host, host_available_bytes)
    if too_much:
        return too_much
    budget = config.cluster.memory_budget_bytes
    there_is_enough = needed_bytes(found, ranks_on_host, device) <= available_bytes
    if there_is_enough and fits_budget(budget, found):
        return None
    # What the process takes besides is no part of a budget.
    process_bytes = 0 if there_is_enough else found.process_bytes

    def fits(changed: RunConfig, other: Layout) -> int | None:
        """Bytes a rank if it can be run and fits."""
        if not accepts(changed, other):
            return None
        trial = estimate(changed, other, widths, device)
        ok = needed_bytes(trial, ranks_on_host, device) <= available_bytes and fits_budget(budget, trial)
        ok = ok and not host_capacity_problem(changed, trial, ranks_on_host, host_available_bytes)
        return trial.peak_bytes + process_bytes if ok else None

    remedies = [*suggest_checkpointing(config, layout, fits), *suggest_model(config, layout, models, fits)]
    remedies += suggest_world_size(config, layout, fits)
    remedies += ["a larger cluster.memory_budget"] if there_is_enough else []
    remedies += ["preflight=false to try"]
    a_rank = found.peak_bytes + process_bytes
    needs = f"model={config.model.name} needs {format_bytes(a_rank)} a rank"
    if there_is_enough:
        limit = f"cluster.memory_budget={config.cluster.memory_budget} is less"
    else:
        limit = f"{format_bytes(available_bytes)} are there"
        if device == "cpu" and ranks_on_host > 1:
            needs += f" x {ranks_on_host} ranks on one host = {format_bytes(a_rank * ranks_on_host)}"
    parts = {**found.at_peak, "process": process_bytes}
    arithmetic = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in parts.items() if size >= MIN_REPORTED_SHARE * a_rank
    )
    return f"{needs} ({arithmetic}), {limit}: choose {', or '.join(remedies)}"


def fits_budget(budget_bytes: int | None, found: MemoryEstimate) -> bool:
    """Whether a rank's tensors are: all that a budget is of."""
    return budget_bytes is None or found.peak_bytes <= budget_bytes


def host_capacity_problem(
    config: RunConfig, found: MemoryEstimate, ranks_on_host: int, available_bytes: int | None
) -> str | None:
    """Why what is offloaded, in memory that cannot be paged out, cannot fit the host beside its ranks' processes."""
    needed = (found.host_bytes + PROCESS_BYTES["cpu"]) * ranks_on_host
    if not found.host_bytes or available_bytes is None or needed <= available_bytes:
        return None
    asked = [f"strategy.offload={config.strategy.offload}"] if config.strategy.offload != "none" else []
    asked += ["checkpointing.offload_activations=true"] if config.checkpointing.offload_activations else []
    return (
        f"{' and '.join(asked)} of model={config.model.name} needs {format_bytes(needed // ranks_on_host)} a rank x"
        f" {ranks_on_host} ranks of the host = {format_bytes(needed)}, {format_bytes(available_bytes)} are there: choose less of"
        " it, a smaller model, or preflight=false to try"
    )


Fits = Callable[[RunConfig, Layout], int | None]  # bytes a rank, None if that cannot be run or does not fit


def suggest_checkpointing(config: RunConfig, layout: Layout, fits: Fits) -> Iterator[str]:
    """Checkpointing that computes little again, and that which keeps least, where they are enough."""
    for name in ("selective", "full"):
        if config.checkpointing.name in (name, "full"):
            continue
        changed = dataclasses.replace(config.checkpointing, name=name, every=1)
        size = fits(dataclasses.replace(config, checkpointing=changed), layout)
        if size is not None:
            yield f"checkpointing={name} ({format_bytes(size)} a rank)"


def suggest_model(config: RunConfig, layout: Layout, models: Sequence[ModelConfig], fits: Fits) -> Iterator[str]:
    """The largest smaller model of the family that fits under the same layout and batch, with the same attention."""
    family = [model for model in models if model.family == config.model.family]
    smaller = [model for model in family if parameter_count(model) < parameter_count(config.model)]
    for model in sorted(smaller, key=parameter_count, reverse=True):
        trial = dataclasses.replace(config, model=dataclasses.replace(model, attention=config.model.attention))
        size = fits(trial, layout)
        if size is not None:
            yield f"model={model.name} ({format_bytes(size)} a rank)"
            return


def suggest_world_size(config: RunConfig, layout: Layout, fits: Fits) -> Iterator[str]:
    """The smallest larger world, by doubling the shards, on hosts or devices like this one."""
    if layout.zero_stage == 0 or layout.dp_shard == 1:
        return
    for doublings in range(1, 13):
        wider = dataclasses.replace(layout, dp_shard=layout.dp_shard * 2**doublings)
        per_pass = config.train.micro_batch * wider.dp
        batch = -(-config.train.global_batch // per_pass) * per_pass
        size = fits(dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch)), wider)
        if size is not None:
            more = "" if batch == config.train.global_batch else f" and train.global_batch={batch}"
            yield f"world_size={wider.world_size}{more} on more such machines ({format_bytes(size)} a rank)"
            return
