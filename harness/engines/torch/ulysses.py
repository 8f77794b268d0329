"""Context parallelism by DeepSpeed-Ulysses (arXiv 2309.14509): ranks exchange their parts of sequences for heads.

Every rank has one part of each sequence. All-to-alls before attention give it whole sequences of its part of the heads,
and one after it gives it all heads of its own positions again. Each token's positions are applied before.
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from harness.models.decoder import Decoder

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchange_heads(model: Decoder, group: ProcessGroup) -> None:
    """Make every attention module compute a part of the heads for whole sequences, in place."""
    for block in model.layers_by_index().values():
        attention = block.get_submodule("self_attn")
        attention.core = ExchangedHeads(attention.core, group)  # type: ignore[assignment,arg-type]


class ExchangedHeads:
    """Attention of which every rank of a group computes whole sequences for a part of the heads."""

    def __init__(self, attend: AttentionFn, group: ProcessGroup) -> None:
        self.attend = attend
        self.group = group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of all heads for this rank's positions; all are (batch, heads, positions, head_dim).

        Grouped heads are repeated until the ranks divide them. All parts have arrived before attention begins: torch
        would wait for a tensor in its first use, which in a second forward may be in backward, and keep what was sent.
        """
        repeats = math.lcm(key.shape[1], self.group.size()) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        sent = [gather_positions(heads, self.group) for heads in (query, key, value)]
        return gather_heads(self.attend(*map(wait_tensor, sent)), self.group)


def gather_positions(heads: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of the heads at all positions, from all heads (batch, heads, positions, head_dim).

    Positions come first in memory, so that the parts that arrive make up whole sequences without a copy.
    """
    batch, _, positions, head_dim = heads.shape
    by_rank = heads.view(batch, group.size(), -1, positions, head_dim)
    parts = by_rank.permute(1, 3, 0, 2, 4).contiguous()  # (rank, position, batch, head, head_dim)
    return all_to_all_single_autograd(parts.flatten(0, 1), None, None, group).permute(1, 2, 0, 3)


def gather_heads(heads: Tensor, group: ProcessGroup) -> Tensor:
    """Return all heads at this rank's positions, from its part of the heads at all of them."""
    parts = all_to_all_single_autograd(heads.permute(2, 0, 1, 3).contiguous(), None, None, group)
    by_rank = parts.view(group.size(), -1, *parts.shape[1:])
    # The projection behind attention takes a position's heads side by side, of which this makes one copy.
    return by_rank.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)
