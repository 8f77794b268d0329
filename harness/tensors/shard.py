"""The description of the part of a named tensor that a rank holds."""

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# The kind of a shard that is not model state at rest: a view into a communication bucket, a parameter that is gathered
# for compute, or a gradient that is reduced or accumulated but not yet in the buffer from which the optimizer reads.
ShardOrigin = Literal["bucket", "gathered", "staging"]
BUCKET: Final = "bucket"
GATHERED: Final = "gathered"
STAGING: Final = "staging"


class Shard(NamedTuple):
    """The part of one named tensor that this rank really holds.

    `shape` is that of the whole tensor, and `box` the (start, stop) that this rank holds along each dimension. A part
    of the flattened tensor has shape (numel,) and a box of one pair. `state_name` is "master" or that
    of an OptimizerSpec's states for a tensor of the optimizer, and a ShardOrigin for a copy beside the state itself.
    """

    name: str
    local: "Tensor"
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    state_name: str = ""
