"""The forkserver's imports before it forks ranks of any device: torch, the worker and PyTorch's engine.

Modules are imported and nothing is called, because a fork does not copy threads, no tensor may exist before a rank has
its allocator, and a fork of a process that has initialized CUDA cannot use the devices.
"""

import contextlib
import gc
import importlib
import logging
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType

import torch

import harness.engines.torch

MODULES = (
    "harness.launcher.rank_entry",
    "harness.worker.main",
    "harness.models.build",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)


RARE = "harness.engines.torch.low_bit"  # imports torchao, which takes seconds and warns of its libraries for GPUs


def load(modules: Iterable[str]) -> None:
    """Import modules. An import that fails here fails again in a rank that needs it.

    Imported objects are never garbage. The imports take a fifth less time without the garbage collector. The objects
    are frozen so that it skips them in the ranks: a full collection of half a million objects would take 0.25 s,
    perhaps in a timed step.
    """
    gc.disable()
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def load_library(modules: Iterable[str]) -> None:
    """Import modules of a library without its warnings, which would stand between the lines of the command."""
    logging.disable()
    load(modules)
    logging.disable(logging.NOTSET)


def modules_of(package: ModuleType) -> Iterator[str]:
    """Yield the names of all modules below a package but the one that few ranks need."""
    infos = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None)
    return (module.name for module in infos if module.name != RARE)


load((*MODULES, *modules_of(harness.engines.torch)))

assert not torch.cuda.is_initialized(), "an import initialized CUDA"  # type: ignore[no-untyped-call]
