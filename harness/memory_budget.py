"""cluster.memory_budget: what a rank may hold, where that can be held to, and what limits it otherwise."""

from collections.abc import Iterator

from harness.byte_sizes import said
from harness.config import RunConfig
from harness.machine import Machine


def refusals(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Why no rank could be held to the budget; imports nothing heavy."""
    from harness.measure.native import compiler_problem

    budget = config.cluster.memory_budget_bytes
    if budget is None:
        return
    named = f"cluster.memory_budget={config.cluster.memory_budget}"
    if machine.device == "cpu" and compiler_problem():
        yield f"{named} is held to by an allocator that is compiled: {compiler_problem()}, or choose null"
    if machine.device_bytes is not None and budget > machine.device_bytes:
        yield f"{named} is more than the {said(machine.device_bytes)} of a device: choose as much or less, or null"


def limit_bytes(config: RunConfig, machine: Machine) -> int | None:
    """The budget, else all of a GPU's memory; that of a CPU is shared, and what a rank may have of it unknown."""
    budget = config.cluster.memory_budget_bytes
    return machine.device_bytes if budget is None else budget
