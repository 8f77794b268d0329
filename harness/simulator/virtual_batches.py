"""The tokens of a virtual rank: those of its own part of the vocabulary.

Where tensor parallelism cuts the vocabulary, other ranks would look up the other tokens. Their hidden states would stay
zero, by which a norm's backward is so steep that gradients of a deep model overflow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from harness.layout.layout import Layout
from harness.worker.batches import Batches


def own_vocabulary(vocab_size: int, layout: Layout, rank: int) -> range:
    """Return the token ids whose rows of embedding and head the rank holds: equal parts, the last ones shorter."""
    part = -(-vocab_size // layout.vocabulary_tp)
    place = layout.coordinates(rank)["tp"] if layout.vocabulary_tp > 1 else 0
    return range(vocab_size)[place * part : (place + 1) * part]


@contextmanager
def own_tokens(vocab_size: int, layout: Layout, rank: int) -> Iterator[None]:
    """Return a context in which all batches have tokens of the rank's own vocabulary, if it has any."""
    own = own_vocabulary(vocab_size, layout, rank)
    read_sequence: Any = Batches.sequence

    def sequence(batches: Batches, step: int, index: int) -> Any:
        tokens = read_sequence(batches, step, index)
        return own.start + tokens % len(own) if len(own) else tokens

    with mock.patch.object(Batches, "sequence", sequence):
        yield
