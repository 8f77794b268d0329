"""The check whether a run fits a machine, and the search for smaller choices that do. Imports no torch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from harness.config.byte_size import format_bytes
from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.memory import PROCESS_BYTES, MemoryEstimate, estimate_memory
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from harness.layout.parameters import parameter_count
from harness.layout.state_widths import StateWidths

MIN_REPORTED_SHARE = 0.005  # of a rank's bytes: the message leaves out smaller parts

Accepts = Callable[[RunConfig, Layout], bool]  # whether a changed configuration could be run as that layout


def is_compatible(config: RunConfig, layout: Layout) -> bool:
    """Return whether a configuration breaks no rule that holds for every engine."""
    return not any(incompatibilities(config, layout))


def needed_bytes(memory: MemoryEstimate, ranks_on_host: int, device: Device) -> int:
    """Return the bytes that a machine must have: a host's ranks share its memory, a CUDA device has one rank."""
    return (memory.peak_bytes + memory.process_bytes) * (ranks_on_host if device == "cpu" else 1)


def capacity_problem(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    *,
    available_bytes: int,
    ranks_on_host: int,
    device: Device,
    models: Sequence[ModelConfig],
    host_available_bytes: int | None = None,
    accepts: Accepts = is_compatible,
) -> str | None:
    """Return why the run cannot fit, in one line with its arithmetic and what would fit; None if it fits.

    `available_bytes` is on cpu the host's free memory, which its ranks share, and on cuda the free memory of one
    device, where all that is offloaded must fit `host_available_bytes` (None: unknown). A rank must fit
    cluster.memory_budget too. `models` are the candidates for a smaller choice; what the message offers is accepted by
    `accepts` and fits.
    """
    memory = estimate_memory(config, layout, widths, device)
    host_problem = host_capacity_problem(config, memory, ranks_on_host, host_available_bytes)
    if host_problem:
        return host_problem
    budget = config.cluster.memory_budget_bytes
    fits_machine = needed_bytes(memory, ranks_on_host, device) <= available_bytes
    if fits_machine and fits_budget(budget, memory):
        return None
    process_bytes = 0 if fits_machine else memory.process_bytes  # a budget is of tensors alone

    def rank_bytes_if_fitting(changed: RunConfig, changed_layout: Layout) -> int | None:
        """Return the bytes of a rank, or None if the configuration cannot run or does not fit."""
        if not accepts(changed, changed_layout):
            return None
        trial = estimate_memory(changed, changed_layout, widths, device)
        fits = needed_bytes(trial, ranks_on_host, device) <= available_bytes and fits_budget(budget, trial)
        fits = fits and not host_capacity_problem(changed, trial, ranks_on_host, host_available_bytes)
        return trial.peak_bytes + process_bytes if fits else None

    remedies = [
        *suggest_checkpointing(config, layout, rank_bytes_if_fitting),
        *suggest_model(config, layout, models, rank_bytes_if_fitting),
        *suggest_world_size(config, layout, rank_bytes_if_fitting),
    ]
    remedies += ["a larger cluster.memory_budget"] if fits_machine else []
    remedies += ["preflight=false to try"]
    rank_bytes = memory.peak_bytes + process_bytes
    needs = f"model={config.model.name} needs {format_bytes(rank_bytes)} a rank"
    if fits_machine:
        limit = f"cluster.memory_budget={config.cluster.memory_budget} is less"
    else:
        limit = f"{format_bytes(available_bytes)} are available"
        if device == "cpu" and ranks_on_host > 1:
            needs += f" x {ranks_on_host} ranks on one host = {format_bytes(rank_bytes * ranks_on_host)}"
    parts = {**memory.at_peak, "process": process_bytes}
    arithmetic = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in parts.items() if size >= MIN_REPORTED_SHARE * rank_bytes
    )
    return f"{needs} ({arithmetic}), {limit}: choose {', or '.join(remedies)}"


def fits_budget(budget_bytes: int | None, memory: MemoryEstimate) -> bool:
    """Return whether a rank's tensors, which are all that a budget counts, fit it; None is no budget."""
    return budget_bytes is None or memory.peak_bytes <= budget_bytes


def host_capacity_problem(
    config: RunConfig, memory: MemoryEstimate, ranks_on_host: int, available_bytes: int | None
) -> str | None:
    """Return why offloaded tensors, which cannot be paged out, do not fit the host beside its ranks' processes.

    Return None if they fit, if nothing is offloaded, or if the host's memory is unknown.
    """
    needed = (memory.host_bytes + PROCESS_BYTES["cpu"]) * ranks_on_host
    if not memory.host_bytes or available_bytes is None or needed <= available_bytes:
        return None
    keys = [f"strategy.offload={config.strategy.offload}"] if config.strategy.offload != "none" else []
    keys += ["checkpointing.offload_activations=true"] if config.checkpointing.offload_activations else []
    return (
        f"{' and '.join(keys)} of model={config.model.name} {'needs' if len(keys) == 1 else 'need'}"
        f" {format_bytes(needed // ranks_on_host)} a rank x {ranks_on_host} ranks of the host ="
        f" {format_bytes(needed)}, {format_bytes(available_bytes)} are available:"
        " choose less offload, a smaller model, or preflight=false to try"
    )


RankBytesIfFitting = Callable[[RunConfig, Layout], int | None]  # None if it cannot run or does not fit


def suggest_checkpointing(config: RunConfig, layout: Layout, fits: RankBytesIfFitting) -> Iterator[str]:
    """Yield the checkpointing that recomputes little, and the one that keeps least, where they are enough."""
    for name in ("selective", "full"):
        if config.checkpointing.name in (name, "full"):
            continue
        changed = dataclasses.replace(config.checkpointing, name=name, every=1)
        size = fits(dataclasses.replace(config, checkpointing=changed), layout)
        if size is not None:
            yield f"checkpointing={name} ({format_bytes(size)} a rank)"


def suggest_model(
    config: RunConfig, layout: Layout, models: Sequence[ModelConfig], fits: RankBytesIfFitting
) -> Iterator[str]:
    """Yield the largest smaller model of the family that fits with the same layout, batch and attention."""
    family = [model for model in models if model.family == config.model.family]
    smaller = [model for model in family if parameter_count(model) < parameter_count(config.model)]
    for model in sorted(smaller, key=parameter_count, reverse=True):
        trial = dataclasses.replace(config, model=dataclasses.replace(model, attention=config.model.attention))
        size = fits(trial, layout)
        if size is not None:
            yield f"model={model.name} ({format_bytes(size)} a rank)"
            return


def suggest_world_size(config: RunConfig, layout: Layout, fits: RankBytesIfFitting) -> Iterator[str]:
    """Yield the smallest larger world that fits, by doubling the shards, on hosts or devices like this one."""
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
