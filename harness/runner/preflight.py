"""cluster.memory_budget: what a rank may hold, where that can be held to, and what limits it otherwise."""

from collections.abc import Iterator

from harness.config.byte_size import format_bytes
from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.layout.layout import Layout


def budget_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Why no rank could be held to the budget; imports nothing heavy."""
    from harness.util.native_build import compiler_problem

    budget = config.cluster.memory_budget_bytes
    if budget is None:
        return
    named = f"cluster.memory_budget={config.cluster.memory_budget}"
    if machine.device == "cpu" and compiler_problem():
        yield f"{named} is held to by an allocator that is compiled: {compiler_problem()}, or choose null"
    if machine.device_bytes is not None and budget > machine.device_bytes:
        yield f"{named} is more than the {format_bytes(machine.device_bytes)} of a device: choose as much or less, or null"


def rank_memory_limit(config: RunConfig, machine: Machine) -> int | None:
    """The budget, else all of a GPU's memory; that of a CPU is shared, and what a rank may have of it unknown."""
    budget = config.cluster.memory_budget_bytes
    return machine.device_bytes if budget is None else budget


def compile_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Why layers cannot be compiled; imports nothing heavy."""
    from harness.util.native_build import compiler_problem

    if not config.train.compile:
        return
    if machine.device == "cpu" and compiler_problem():
        yield f"train.compile=true makes C++ of every layer: {compiler_problem()}"
    if layout.pp > 1 and layout.schedule == "zero_bubble":
        yield (
            "train.compile=true makes one operator of a layer's backward, which strategy.schedule=zero_bubble takes in"
            " halves: choose false, or another schedule"
        )
    if config.checkpointing.name in ("selective", "attention"):
        yield (
            f"checkpointing={config.checkpointing.name} runs parts of a layer again, of which train.compile=true makes"
            " one whole: choose none, full or every_n, or train.compile=false"
        )
