"""The world of a simulated rank, whose other ranks do not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Play one rank of a world by torch's fake process group: its collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
