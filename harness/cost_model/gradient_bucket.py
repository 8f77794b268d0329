"""The bucket in which DeepSpeed's stages 2 and 3 collect gradients to reduce them. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from harness.config.model import ModelConfig
from harness.cost_model.layer_backward import Moment
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import ShardGroups
from harness.layout.layer_spec import layer_branches, layer_matrices


@dataclass(frozen=True)
class GradientBucket:
    """The way of gradients to their shards, one after another; sizes are in elements."""

    limit: int
    gradient: int  # bytes of an element as backward computes it

    def is_large(self, size: int) -> bool:
        """Return whether a gradient does not fit the bucket."""
        return size > self.limit

    def flush(self, content: int, size: int) -> int:
        """Return what is reduced when a gradient of this size arrives at a bucket with this content."""
        return content if content + size > self.limit else 0

    def add(self, content: int, size: int) -> int:
        """Return the bucket's content after this gradient has arrived."""
        return size if self.flush(content, size) else content + size

    def waiting_bytes(self, content: int) -> int:
        """Return the bytes of the gradient that waits outside the bucket."""
        return content * self.gradient if self.is_large(content) else 0


class Arrival(NamedTuple):
    """A moment of a layer's backward, and what it finds in the bucket."""

    moment: Moment
    content: int  # elements that the bucket has when the moment begins
    flushed: tuple[int, ...]  # elements that are reduced because a gradient arrives, one after the other


def arrivals(
    bucket: GradientBucket, moments: Sequence[Moment], content: int, small: int, has_biases: bool
) -> Iterator[Arrival]:
    """Yield the moments of a layer's backward, which it enters with this content of the bucket.

    `small` is the elements of a norm's or a bias's gradient, which follows that of the last matrix that reads a norm's
    result, and of every matrix with a bias.
    """
    for moment in moments:
        if not moment.is_accumulation:
            yield Arrival(moment, content, ())
            continue
        before, flushed = content, [bucket.flush(content, moment.computed)]
        content = bucket.add(content, moment.computed)
        if has_biases or not moment.is_followed_by_matrix:
            flushed.append(bucket.flush(content, small))
            content = bucket.add(content, small)
        yield Arrival(moment, before, tuple(flushed))


class LayerArrivals(NamedTuple):
    """The bucket in the backward of a layer."""

    content: int  # elements that it has when backward enters the layer
    most_flushed: int  # the most elements that are reduced at a time


@lru_cache(maxsize=1024)
def layer_arrivals(model: ModelConfig, groups: ShardGroups, bucket: GradientBucket) -> list[LayerArrivals]:
    """Return the bucket in the backward of all layers, the last one first, and of what lies before the layers."""
    small = model.hidden_size
    tail = [groups.head.largest] if groups.head.elements else []
    content = 0
    for size in (*tail, small):
        content = bucket.add(content, size)
    sizes, layers = layer_gradient_sizes(model, groups), []
    for _ in range(groups.layers):
        before, flushed = content, 0
        for size in sizes:
            flushed = max(flushed, bucket.flush(content, size))
            content = bucket.add(content, size)
        layers.append(LayerArrivals(before, flushed))
    return [*layers, LayerArrivals(content, 0)]


def rising_layers(sizes: Sequence[int]) -> list[int]:
    """Return the layers with a larger size than all before them, but for those that observed_layers names.

    `sizes` are those of layers in the order of backward, which has less and less activations, so that no other layer of
    the middle can be the worst.
    """
    layers, most = [], 0
    for following, size in enumerate(sizes):
        if size > most:
            most = size
            layers.append(following)
    return sorted(set(layers) - set(observed_layers(len(sizes))))


def layer_gradient_sizes(model: ModelConfig, groups: ShardGroups) -> list[int]:
    """Return the elements of a layer's gradients in the order in which backward computes them."""
    hidden, sizes = model.hidden_size, list[int]()
    elements = {matrix.name: matrix.elements for matrix in layer_matrices(model)}
    for branch in reversed(layer_branches(model)):
        sizes += [elements[operator.matrix] for operator in reversed(branch.operators) if operator.matrix]
        sizes.append(hidden)  # of the norm
    divided = groups.layer.elements / sum(sizes)
    return [round(size * divided) if size > hidden else size for size in sizes]
