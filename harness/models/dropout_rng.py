"""Random numbers of dropout: masks that follow from the seed and from what a rank has of the data and the model.

Ranks that hold the same (the residual stream of tensor-parallel ranks) must drop the same of it; ranks that hold
different data, heads, parts of the sequence or layers each drop their own.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harness.layout.layout import Layout


def dropout_seed(seed: int, layout: Layout, rank: int) -> int:
    """What a rank's default generators start from: the same on tensor-parallel ranks that share whole sequences."""
    place = layout.coordinates(rank)
    sequence = place["tp"] if layout.sequence_parallel else 0
    purpose = f"{seed}/masks/{layout.data_rank(rank)}/{place['pp']}/{place['cp']}/{sequence}"
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big") >> 1


def dropout_rng_ranks(model: nn.Module) -> list[int | None]:
    """By which rank a model's heads tell their masks from those of its peers; None: by its generators alone.

    Those of a model from outside have nothing else.
    """
    modules: Iterable[Any] = model.modules()
    ranks: set[int | None] = {module.dropout_rng_rank for module in modules if hasattr(module, "dropout_rng_rank")}
    return sorted(ranks, key=str) or [None]


@contextmanager
def rank_local_rng(rank: int | None) -> Iterator[None]:
    """Inside, masks are this rank's own, though outside they are those of its peers; None changes nothing.

    The seed is drawn from the CPU's default generator, which checkpointing puts back for a second forward, and on which
    nothing has to be waited for.
    """
    if rank is None:
        yield
        return
    drawn = int(torch.randint(1 << 62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(drawn + rank)
        yield
