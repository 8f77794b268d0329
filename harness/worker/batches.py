"""The training data of a rank: its part of every global batch."""

from typing import TYPE_CHECKING

import numpy as np

from harness.config.schema import RunConfig
from harness.data.corpus import Corpus
from harness.layout.layout import Layout

if TYPE_CHECKING:
    import torch

    from harness.engines.base import Batch


class Batches:
    """The rank's part of the global batch of every step: whole sequences, or with context parallelism spans of them."""

    def __init__(self, corpus: Corpus, config: RunConfig, layout: Layout, rank: int, device: "torch.device") -> None:
        """Open the corpus, and determine the sequences and spans of this rank."""
        self.tokens = None if corpus.path is None else np.memmap(corpus.path, dtype=np.uint8, mode="r")
        self.config = config
        self.device = device
        self.accumulation = layout.grad_accumulation_steps(config.train)
        share = config.train.global_batch // layout.dp
        first = layout.data_rank(rank) * share
        self.sequences = range(first, first + share)
        self.spans = layout.sequence_chunks(rank, config.train.seq_len)
        self.has_spans = layout.cp_enabled

    def sequence(self, step: int, index: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the token ids, of shape (seq_len + 1,), of one sequence of a step's global batch."""
        train = self.config.train
        random = np.random.default_rng((train.seed, step, index))
        length = train.seq_len + 1
        if self.tokens is None:
            return random.integers(0, self.config.model.vocab_size, length)
        start = random.integers(0, len(self.tokens) - length)
        return self.tokens[start : start + length].astype(np.int64)

    def __call__(self, step: int) -> "list[Batch]":
        """Return the rank's micro-batches of a step, in order, on its device."""
        import torch

        from harness.engines.base import Batch

        rows = np.stack([self.sequence(step, index) for index in self.sequences])
        tokens = torch.from_numpy(rows)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        inputs, targets = (
            torch.cat([side[:, start:stop] for start, stop in self.spans], dim=1) if self.has_spans else side
            for side in (tokens[:, :-1], tokens[:, 1:])
        )
        size = self.config.train.micro_batch
        return [Batch(*parts) for parts in zip(torch.split(inputs, size), torch.split(targets, size), strict=True)]
