"""torch.compile, decoder layer by decoder layer; what of it can be proven."""

import sys
from collections.abc import Iterator
from typing import Any

from harness.config import RunConfig
from harness.layout import Layout
from harness.machine import Machine


def refusals(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Why layers cannot be compiled; imports nothing heavy."""
    from harness.measure.native import compiler_problem

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


def apply_compile(model: Any, asked_for: bool) -> None:
    """Compiles the forward of every decoder layer in place; what wraps a layer later, checkpointing too, is outside."""
    if not asked_for:
        return
    import torch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # in this process: a pool would outlive the compilation and share the timed steps
    for block in model.blocks().values():
        block.forward = torch.compile(block.forward, dynamic=False)


def graphs() -> int:
    """Graphs compiled so far in this process; the compiler is imported by who needs it."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])
