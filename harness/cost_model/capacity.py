"""The check whether a run fits a machine, and why not. Imports no torch."""

from harness.config.byte_size import format_bytes
from harness.config.schema import Device, RunConfig
from harness.cost_model.memory import PROCESS_BYTES, MemoryEstimate, estimate_memory
from harness.cost_model.remedies import Choices, Variant, remedies, smaller_model
from harness.layout.layout import Layout

MIN_REPORTED_SHARE = 0.005  # of a rank's bytes: the message leaves out smaller parts


def needed_bytes(memory: MemoryEstimate, ranks_on_host: int, device: Device) -> int:
    """Return the bytes that a machine must have: a host's ranks share its memory, a CUDA device has one rank."""
    return (memory.peak_bytes + memory.process_bytes) * (ranks_on_host if device == "cpu" else 1)


def capacity_problem(
    config: RunConfig,
    layout: Layout,
    memory: MemoryEstimate,
    choices: Choices,
    *,
    available_bytes: int,
    ranks_on_host: int,
    device: Device,
    host_available_bytes: int | None = None,
) -> str | None:
    """Return why a run of this memory cannot fit, in one line with its arithmetic and what would; None if it fits.

    `available_bytes` is on cpu the host's free memory, which its ranks share, and on cuda the free memory of one
    device, where all that is offloaded must fit `host_available_bytes` (None: unknown). A rank must fit
    cluster.memory_budget too. What the message offers is one of `choices` and fits.
    """
    host_problem = host_capacity_problem(config, memory, ranks_on_host, host_available_bytes)
    if host_problem:
        return host_problem
    budget = config.cluster.memory_budget_bytes
    fits_machine = needed_bytes(memory, ranks_on_host, device) <= available_bytes
    if fits_machine and fits_budget(budget, memory):
        return None
    process_bytes = 0 if fits_machine else memory.process_bytes  # a budget is of tensors alone

    def rank_bytes_if_fitting(variant: Variant) -> int | None:
        """Return the bytes of a rank of a changed run, or None if it does not fit."""
        changed = variant.config
        ranks = ranks_on_host
        if changed.strategy.name != config.strategy.name:  # otherwise more ranks are on more hosts
            ranks = max(1, ranks_on_host * variant.layout.world_size // layout.world_size)
        trial = estimate_memory(changed, variant.layout, variant.widths, device)
        fits = needed_bytes(trial, ranks, device) <= available_bytes and fits_budget(budget, trial)
        fits = fits and not host_capacity_problem(changed, trial, ranks, host_available_bytes)
        return trial.peak_bytes + process_bytes if fits else None

    offers = list(remedies(config, layout, choices, rank_bytes_if_fitting))
    offers += ["a larger cluster.memory_budget"] if fits_machine else []
    offers += ["preflight=false to try", *smaller_model(config, layout, choices, rank_bytes_if_fitting)]
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
    return f"{needs} ({arithmetic}), {limit}: choose {', or '.join(offers)}"


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
        " choose less offload, preflight=false to try, or a smaller model"
    )
