"""torch.compile, decoder layer by decoder layer, and the number of graphs it has compiled."""

import sys
from typing import Any


def apply_compile(model: Any, enabled: bool) -> None:
    """Compile the forward of every decoder layer in place; later wrappers, such as checkpointing, stay outside."""
    if not enabled:
        return
    import torch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # a pool of processes would outlive the compilation and disturb the timed steps
    for block in model.layers_by_index().values():
        block.forward = torch.compile(block.forward, dynamic=False)


def compiled_graph_count() -> int:
    """Return the number of graphs compiled so far in this process, without importing the compiler."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])
