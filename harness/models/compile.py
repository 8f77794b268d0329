"""torch.compile, decoder layer by decoder layer; what of it can be proven."""

import sys
from typing import Any


def apply_compile(model: Any, enabled: bool) -> None:
    """Compiles the forward of every decoder layer in place; what wraps a layer later, checkpointing too, is outside."""
    if not enabled:
        return
    import torch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # in this process: a pool would outlive the compilation and share the timed steps
    for block in model.layers_by_index().values():
        block.forward = torch.compile(block.forward, dynamic=False)


def compiled_graph_count() -> int:
    """Graphs compiled so far in this process; the compiler is imported by who needs it."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])
