"""Random numbers of dropout, whose masks follow from the seed and from a rank's part of the data and the model.

Ranks that hold the same activations (the residual stream of tensor-parallel ranks) must draw the same masks; ranks that
hold different data, heads, parts of the sequence or layers draw different ones.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harness.layout.layout import Layout
from harness.models.init_weights import generator


def dropout_seed(seed: int, layout: Layout, rank: int) -> int:
    """Return the seed of a rank's default generators: the same on tensor-parallel ranks that share whole sequences."""
    coordinates = layout.coordinates(rank)
    sequence = coordinates["tp"] if layout.sequence_parallel else 0
    purpose = f"masks/{layout.data_rank(rank)}/{coordinates['pp']}/{coordinates['cp']}/{sequence}"
    return generator(seed, purpose, torch.device("cpu")).initial_seed()


def dropout_rng_ranks(model: nn.Module) -> list[int | None]:
    """Return the ranks by which a model's attentions make their masks differ from their peers'.

    None stands for masks that follow from the default generators alone, as in every Hugging Face model.
    """
    modules: Iterable[Any] = model.modules()
    ranks: set[int | None] = {module.dropout_rng_rank for module in modules if hasattr(module, "dropout_rng_rank")}
    return sorted(ranks, key=str) or [None]


@contextmanager
def rank_local_rng(rank: int | None) -> Iterator[None]:
    """Return a context in which masks differ from rank to rank although the generators are equal outside.

    A rank of None changes nothing. The seed is drawn from the CPU's default generator, which checkpointing restores for
    the recomputation, and which needs no synchronization with a device.
    """
    if rank is None:
        yield
        return
    shared_seed = int(torch.randint(1 << 62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(shared_seed + rank)
        yield
