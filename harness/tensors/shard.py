"""What an engine says of a tensor it holds a part of."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Slots of shards that are not model state at rest: communication buckets, parameters gathered for compute, and buffers
# between device and host.
BUCKET, GATHERED, STAGING = "bucket", "gathered", "staging"


class Shard(NamedTuple):
    """The part of one named tensor that this rank really holds.

    shape is that of the whole tensor and box the (start, stop) this rank holds along each dimension. A piece cut
    from the flattened tensor has shape (numel,) and a box of one pair. `slot` tells an optimizer's tensors apart
    (master, exp_avg, exp_avg_sq).
    """

    name: str
    local: "Tensor"
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    state_name: str = ""
