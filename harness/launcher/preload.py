"""The forkserver's imports before it forks CPU ranks: what every rank needs, so that none has to import it again.

Modules are imported and nothing is called, because a fork does not copy threads, and no tensor may exist before a rank
has its allocator.
"""

import contextlib
import gc
import importlib
import pkgutil

from harness import engines
from harness.launcher.forkserver import temporary_environment

MODULES = (
    "harness.launcher.rank_entry",
    "harness.worker.main",
    "harness.models.build",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "deepspeed",
)

# DeepSpeed's stages import an optimizer that none of our runs uses. torch.compile compiles its functions as they are
# defined, for which torch imports its whole compiler: 0.7 s in every rank.
UNCOMPILED = "deepspeed.runtime.zero.muon.muon_optimizer"

COMPILER_SWITCH = "TORCHDYNAMO_DISABLE"  # torch's variable: with '1' it leaves functions as they are defined


def load() -> None:
    """Import MODULES and all modules of the engines. An import that fails here fails again in a rank that needs it."""
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with temporary_environment({COMPILER_SWITCH: "1"}), contextlib.suppress(Exception):
        importlib.import_module(UNCOMPILED)
    for module in pkgutil.walk_packages(engines.__path__, f"{engines.__name__}.", onerror=lambda _: None):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)


# Imported objects are never garbage. The imports take a fifth less time without the garbage collector. The objects are
# frozen so that it skips them in the ranks: a full collection of half a million objects would take 0.25 s, perhaps in a
# timed step.
gc.disable()

load()

gc.freeze()

gc.enable()
