"""Checks before a process is started: whether layers can be compiled, and a memory budget be enforced."""

from collections.abc import Iterator

from harness.config.byte_size import format_bytes
from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.layout.layout import Layout


def budget_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield why cluster.memory_budget cannot be enforced on this machine; nothing heavy is imported."""
    from harness.util.native_build import compiler_problem

    budget = config.cluster.memory_budget_bytes
    if budget is None:
        return
    setting = f"cluster.memory_budget={config.cluster.memory_budget}"
    if machine.device == "cpu" and compiler_problem():
        yield f"{setting} is enforced by an allocator that must be compiled: {compiler_problem()}, or choose null"
    if machine.device_bytes is not None and budget > machine.device_bytes:
        yield (
            f"{setting} is more than the {format_bytes(machine.device_bytes)} of a device: choose as much or less, or"
            " null"
        )


def rank_memory_limit(config: RunConfig, machine: Machine) -> int | None:
    """Return the bytes that a rank may use: the budget, else all memory of its GPU.

    Return None on a CPU without a budget: ranks share its memory, and the share of one is not known.
    """
    budget = config.cluster.memory_budget_bytes
    return machine.device_bytes if budget is None else budget


def compile_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield why layers cannot be compiled; nothing heavy is imported."""
    from harness.util.native_build import compiler_problem

    if not config.train.compile:
        return
    if machine.device == "cpu" and compiler_problem():
        yield f"train.compile=true compiles every layer as C++: {compiler_problem()}"
    if layout.splits_backward:
        yield (
            "train.compile=true fuses a layer's backward into one operator, which strategy.schedule=zero_bubble must"
            " split in halves: choose train.compile=false, or another schedule"
        )
    if config.checkpointing.name in ("selective", "attention"):
        yield (
            f"checkpointing={config.checkpointing.name} recomputes parts of a layer, which train.compile=true fuses"
            " into one: choose none, full or every_n, or train.compile=false"
        )
