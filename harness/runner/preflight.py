"""Checks before a process is started: whether layers can be compiled, and a memory budget be enforced."""

from collections.abc import Iterator

from harness.config.byte_size import format_bytes
from harness.config.schema import Device, RunConfig
from harness.hardware.machine import CORES_PER_GPU_RANK, Machine
from harness.layout.layout import Layout
from harness.runner.machine_defaults import computes_bf16
from harness.util.text import count_text


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


def precision_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield why this machine does not compute in the configured precision."""
    capability = machine.compute_capability
    if capability is None or config.precision.compute != "bfloat16":
        return
    if not computes_bf16("cuda", capability):
        yield (
            f"precision={config.precision.name} is emulated on {machine.device_name}, whose compute capability"
            f" {capability[0]}.{capability[1]} is below 8.0: choose fp32 or fp16_mixed"
        )


def core_note(device: Device, ranks: int, cores: int) -> str | None:
    """Return a warning if the ranks on GPUs have too few cores to launch kernels in time, else None."""
    if device != "cuda" or cores >= CORES_PER_GPU_RANK * ranks:
        return None
    return (
        f"{count_text(ranks, 'rank')} on GPUs and {count_text(cores, 'core')}, fewer than {CORES_PER_GPU_RANK} for a"
        " rank: steps may wait for the processor. Slurm gives more with --cpus-per-task"
    )


def rank_memory_limit(config: RunConfig, machine: Machine) -> int | None:
    """Return the bytes that a rank may use: the budget, else all memory of its GPU.

    Return None on a CPU without a budget: ranks share its memory, and the share of one is not known.
    """
    budget = config.cluster.memory_budget_bytes
    return machine.device_bytes if budget is None else budget


def compile_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield why layers cannot be compiled; nothing heavy is imported."""
    from harness.util.native_build import compiler_problem, triton_problem

    if not config.train.compile:
        return
    if machine.device == "cpu" and compiler_problem():
        yield f"train.compile=true compiles every layer as C++: {compiler_problem()}"
    if machine.device == "cuda" and triton_problem(machine.compute_capability):
        problem = triton_problem(machine.compute_capability)
        yield f"train.compile=true compiles every layer with Triton: {problem}, or choose train.compile=false"
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
