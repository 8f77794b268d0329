"""Imported by the forkserver before it forks CPU ranks: what they need anyway, so that none imports it again.

Imported and nothing more: a fork carries no threads over, and no tensor may exist before a rank has its allocator.
"""

import contextlib
import importlib

MODULES = (
    "harness.rank",
    "harness.worker",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "deepspeed",
)

for _module in MODULES:
    with contextlib.suppress(Exception):  # what cannot be imported fails in the rank that needs it, and in its log
        importlib.import_module(_module)
