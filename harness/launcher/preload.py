"""Imported by the forkserver before it forks CPU ranks: what they need anyway, so that none imports it again.

Imported and nothing more: a fork carries no threads over, and no tensor may exist before a rank has its allocator.
"""

import contextlib
import gc
import importlib
import os
import pkgutil

from harness import engines

MODULES = (
    "harness.launcher.rank_entry",
    "harness.worker.main",
    "harness.models.build",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.utils.cpp_extension",  # with which DeepSpeed loads its collective
    "deepspeed",
)

# DeepSpeed's stages import an optimizer that none of our runs uses. Its functions are compiled by torch.compile as they
# are defined, for which torch imports its whole compiler, 0.7 s in every rank.
UNCOMPILED = "deepspeed.runtime.zero.muon.muon_optimizer"

COMPILER_SWITCH = "TORCHDYNAMO_DISABLE"  # torch's own: '1' leaves functions that are being defined as they are


def load() -> None:
    """Imports all of it, with every engine's own modules. What cannot be fails in the rank that needs it."""
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    before = os.environ.get(COMPILER_SWITCH)
    os.environ[COMPILER_SWITCH] = "1"
    with contextlib.suppress(Exception):
        importlib.import_module(UNCOMPILED)
    if before is None:
        del os.environ[COMPILER_SWITCH]
    else:
        os.environ[COMPILER_SWITCH] = before
    for module in pkgutil.walk_packages(engines.__path__, f"{engines.__name__}.", onerror=lambda _: None):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)


# What is imported is never garbage. Without the collector the imports take a fifth less; frozen, their half a million
# objects stay out of its sight in the ranks, where one full collection over them takes 0.25 s, perhaps in a timed step.
gc.disable()

load()

gc.freeze()

gc.enable()
