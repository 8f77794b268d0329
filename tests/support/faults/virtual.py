"""Virtual ranks whose stand-ins for the other ranks do not do their part."""

from contextlib import nullcontext
from typing import Any

import torch

from harness.simulator.process import virtual_entry
from harness.simulator.process_group import completed
from tests.support.plant import replaces

VIRTUAL_RANK = "harness.simulator.virtual_rank"


@replaces(f"{VIRTUAL_RANK}.fill_received", worker=virtual_entry)
def nothing_received(_: Any, tensor: Any, size: float) -> None:
    """Leave in the tensors of messages what may have been there in memory."""
    tensor.data.fill_(torch.nan)


@replaces(f"{VIRTUAL_RANK}.keep_bucket", worker=virtual_entry)
def bucket_not_reduced(_: Any, group: object, bucket: Any) -> Any:
    """Give DDP its buckets back without an all-reduce."""
    return completed(bucket.buffer())


@replaces(f"{VIRTUAL_RANK}.HeldMessages.__init__", worker=virtual_entry)
def sent_tensors_dropped(_: Any, self: Any, works: object, tensors: object) -> None:
    """Free what a stage sends before a message of a real process group would."""
    self.works, self.tensors = [], []


@replaces(f"{VIRTUAL_RANK}.own_tokens", worker=virtual_entry)
def whole_vocabulary(*_: Any) -> Any:
    """Give the rank tokens whose rows of the embedding other ranks hold."""
    return nullcontext()
