"""Context parallelism: every rank has two chunks of each sequence, and gathers all keys and values for attention.

It uses an all-gather and not a ring of sends, as Llama 3 does (arXiv 2407.21783, section 3.3.2): with grouped-query
heads keys and values are small, and any attention kernel can be used. Layout.sequence_chunks orders the chunks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from harness.models.decoder import Decoder, SequenceChunks, causal_mask_lower_right

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def apply_context_parallel(model: Decoder, group: ProcessGroup, sequence_chunks: SequenceChunks) -> None:
    """Make every attention module see the whole sequence, in place; this rank holds the given chunks of it."""
    for block in model.layers_by_index().values():
        attention = block.get_submodule("self_attn")
        attention.core = AllGatherAttention(attention.core, group, sequence_chunks)  # type: ignore[assignment,arg-type]


class AllGatherAttention:
    """Attention of this rank's queries over all ranks' keys and values, each (batch, heads, positions, head_dim)."""

    def __init__(self, attend: AttentionFn, group: ProcessGroup, sequence_chunks: SequenceChunks) -> None:
        self.attend = attend
        self.group = group
        self.sequence_chunks = sequence_chunks
        for start, stop in sequence_chunks:
            causal_mask_lower_right(stop - start, stop)  # cached before a dispatch mode may be active

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention's output for this rank's positions."""
        own = torch.stack(torch.stack((key, value)).chunk(2, dim=3))  # (chunk, key or value, batch, ...)
        gathered = all_gather_tensor_autograd(own, gather_dim=0, group=self.group)
        keys, values = torch.cat(list(unshuffle_chunks(gathered)), dim=3)
        outputs = [
            self.attend(chunk, keys[:, :, :stop], values[:, :, :stop])
            for chunk, (_, stop) in zip(query.chunk(2, dim=2), self.sequence_chunks, strict=True)
        ]
        return torch.cat(outputs, dim=2)


def unshuffle_chunks(gathered: Tensor) -> Iterator[Tensor]:
    """Yield the chunks of a sequence from first to last.

    Rank r holds chunk r from the front and chunk r from the back, so the ranks' first chunks come in order and their
    second chunks follow in reverse.
    """
    ranks = gathered.shape[0] // 2
    yield from (gathered[2 * rank] for rank in range(ranks))
    yield from (gathered[2 * rank + 1] for rank in reversed(range(ranks)))
