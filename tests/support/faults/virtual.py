"""Virtual ranks whose stand-ins for the other ranks do not do their part."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.futures import Future

from harness.simulator import virtual_rank
from harness.simulator.process import virtual_entry
from harness.simulator.process_group import completed


def nothing_received(run_dir: str) -> None:
    """Leave in the tensors of messages what may have been there in memory."""

    def fill_with_nan(tensor: Tensor, size: float) -> None:
        tensor.data.fill_(torch.nan)

    virtual_rank.fill_received = fill_with_nan
    virtual_entry(run_dir)


def bucket_not_reduced(run_dir: str) -> None:
    """Give DDP its buckets back without an all-reduce."""

    def keep(group: object, bucket: torch._C._distributed_c10d.GradBucket) -> Future[Tensor]:
        return completed(bucket.buffer())

    virtual_rank.keep_bucket = keep
    virtual_entry(run_dir)


def sent_tensors_dropped(run_dir: str) -> None:
    """Free what a stage sends before a message of a real process group would."""
    virtual_rank.HeldMessages.__init__ = _hold_nothing  # type: ignore[method-assign,assignment]
    virtual_entry(run_dir)


def _hold_nothing(self: virtual_rank.HeldMessages, works: object, tensors: object) -> None:
    self.works, self.tensors = [], []


def whole_vocabulary(run_dir: str) -> None:
    """Give the rank tokens whose rows of the embedding other ranks hold."""
    virtual_rank.own_tokens = lambda *_: nullcontext()  # type: ignore[assignment]
    virtual_entry(run_dir)
