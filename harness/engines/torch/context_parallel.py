"""Context parallelism: every rank has two chunks of each sequence, and gathers all keys and values for attention.

All-gather and not a ring of sends, as in Llama 3 (arXiv 2407.21783, section 3.3.2): with grouped heads keys and values
are small, and any attention kernel can be used. The chunks lie in the order of Layout.spans.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from harness.models.decoder import Decoder, SequenceChunks, causal_mask_lower_right

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def apply_context_parallel(model: Decoder, group: ProcessGroup, sequence_chunks: SequenceChunks) -> None:
    """Lets every attention of a part see the whole sequence, though this rank has but these spans of it."""
    for block in model.layers_by_index().values():
        attention = block.get_submodule("self_attn")
        attention.core = AllGatherAttention(attention.core, group, sequence_chunks)  # type: ignore[assignment,arg-type]


class AllGatherAttention:
    """Attention over what all ranks of a group have; query, key and value (batch, heads, positions, head_dim)."""

    def __init__(self, attend: AttentionFn, group: ProcessGroup, sequence_chunks: SequenceChunks) -> None:
        self.attend = attend
        self.group = group
        self.sequence_chunks = sequence_chunks
        for start, stop in sequence_chunks:
            causal_mask_lower_right(stop - start, stop)  # made now: operators may be listened to later

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = torch.stack(torch.stack((key, value)).chunk(2, dim=3))  # two chunks first
        gathered = all_gather_tensor_autograd(own, gather_dim=0, group=self.group)
        keys, values = torch.cat(list(unshuffle_chunks(gathered)), dim=3)
        mixed = [
            self.attend(part, keys[:, :, :stop], values[:, :, :stop])
            for part, (_, stop) in zip(query.chunk(2, dim=2), self.sequence_chunks, strict=True)
        ]
        return torch.cat(mixed, dim=2)


def unshuffle_chunks(gathered: Tensor) -> Iterator[Tensor]:
    """The chunks of a sequence from first to last: of each rank's two the one from the front, then those behind."""
    ranks = gathered.shape[0] // 2
    yield from (gathered[2 * rank] for rank in range(ranks))
    yield from (gathered[2 * rank + 1] for rank in reversed(range(ranks)))
