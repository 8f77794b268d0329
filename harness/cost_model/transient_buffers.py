"""The memory of parameters that are whole for a while and of gradients on their way to shards. Imports no torch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from harness.config.model import ModelConfig
from harness.cost_model.layer_backward import Moment
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, local_numel


class LayerBuffers(Protocol):
    """A layer whose buffers change within its backward."""

    def __hash__(self) -> int:
        """Return a hash of all that decides them."""

    def buffer_bytes(self, moments: Sequence[Moment], new_gradients: int) -> list[tuple[int, int]]:
        """Return the bytes of gradients and of buffers at each of the moments of its backward.

        `new_gradients` is the bytes of the rank's own gradients that the pass allocates.
        """


class Pass(NamedTuple):
    """The place of a micro-batch's pass through a stage among those of its step."""

    is_first: bool = True  # whether no earlier micro-batch has left gradients in the stage
    gathers: bool = True  # whether its forward is the only one of the stage so far
    is_last: bool = True  # whether its backward is the stage's last one of the step


ONLY_PASS = Pass()


@dataclass(frozen=True)
class TransientBuffers:
    """The bytes at the moments of a micro-batch's pass through a stage, beside state, activations and temporaries."""

    forward: int = 0  # at the end of forward
    forward_layers: tuple[int, ...] = ()  # the most in each layer's forward, where layers differ in it
    last_layer: int = 0  # when forward enters the last layer and gathers its parameters
    loss: int = 0
    entering: int = 0  # when backward begins and gathers parameters
    head: int = 0  # in the head's backward, without the head's gradient
    head_reduction: int = 0  # when that gradient is reduced
    reduces_head: bool = False  # whether DeepSpeed's stage 2 reduces it before the layers' and allocates its partition
    later: int = 0  # of the rank's gradients, those that come later and stay until the end of backward
    entered: tuple[int, ...] = ()  # when backward enters the layers that observed_layers names
    layers: tuple[int, ...] = ()  # in the backward of these layers, without their gradients
    reductions: tuple[int, ...] = ()  # at the end of these backwards, while gradients are reduced
    observed: "tuple[LayerBuffers, ...]" = ()  # these layers, where buffers change from moment to moment
    middle: "tuple[tuple[int, LayerBuffers], ...]" = ()  # other layers that so many follow and that have more buffers
    last_gradient: int = 0  # when the embedding's gradient, which is included, is computed
    reduces_before_end: bool = True  # whether DeepSpeed's stage 2 has allocated its partition of gradients before that
    first_reduction: int = 0  # in the reduction behind which it allocates the partition
    end: int = 0  # when the last gradient, which is included, is reduced

    @property
    def largest(self) -> int:
        """The most bytes at any of these moments."""
        in_forward = (self.forward, *self.forward_layers, self.last_layer)
        around_head = (self.loss, self.entering, self.head, self.head_reduction)
        around_layers = (*self.entered, *self.layers, *self.reductions)
        at_end = (self.last_gradient, self.first_reduction, self.end)
        return max(*in_forward, *around_head, *around_layers, *at_end)

    def in_layer(self, index: int) -> int:
        """Return the bytes in the backward of the layer with this index among those observed."""
        return self.layers[index] if self.layers else 0


@dataclass(frozen=True)
class GroupSizes:
    """The elements of the parameters of a stage that are gathered and reduced together; 0 where there are none."""

    embedding: float
    layer: float  # the largest
    head: float  # with the embedding, where they are tied
    total: float

    @property
    def first(self) -> float:
        """The elements of the group whose gradient is reduced last."""
        return self.embedding or self.head or self.layer


def parameter_groups(model: ModelConfig, layout: Layout, stage: Stage) -> dict[str, float]:
    """Return the elements of each group of parameters that fully_shard gathers together, by the group's name.

    Tensor parallelism has divided them already. Every layer is a group, and so are the embedding and the head, which
    are one group where they are tied.
    """
    groups: dict[str, float] = defaultdict(float)
    names = group_names(model)
    for parameter, elements in local_numel(model, layout, stage).items():
        groups[names[parameter]] += elements
    return groups


@lru_cache(maxsize=16)
def group_names(model: ModelConfig) -> Mapping[str, str]:
    """Return the name of each parameter's group: `layers.` and the index of its layer, `embedding` or `head`."""
    profile = model_profile(model)
    embedding = () if model.tie_word_embeddings else profile.embedding_shapes
    layers = {name: profile.layer_index(name) for name in profile.parameter_shapes}
    return {
        name: f"layers.{layer}" if layer is not None else "embedding" if name in embedding else "head"
        for name, layer in layers.items()
    }


def group_sizes(model: ModelConfig, layout: Layout, stage: Stage, by_parameter: bool) -> GroupSizes:
    """Return the sizes of a stage's groups, or of the largest parameter of each group."""
    return _group_sizes(model, without_data_parallelism(layout), stage, by_parameter)


def without_data_parallelism(layout: Layout) -> Layout:
    """Return the layout of a single replica's ranks, on which all depends that data parallelism does not divide.

    Layouts that differ in data parallelism alone then share what was computed for one of them.
    """
    return Layout("", "none", 0, 1, 1, layout.tp, False, 1, 1, "1f1b", 1, None, "none", layout.vocabulary_parallel)


@lru_cache(maxsize=1024)
def _group_sizes(model: ModelConfig, layout: Layout, stage: Stage, by_parameter: bool) -> GroupSizes:
    sizes = parameter_groups(model, layout, stage)
    total = sum(sizes.values())
    if by_parameter:
        names = group_names(model)
        sizes = defaultdict(float)
        for parameter, elements in local_numel(model, layout, stage).items():
            group = names[parameter]
            sizes[group] = max(sizes[group], elements)
    return GroupSizes(sizes.get("embedding", 0), _largest_layer(sizes), sizes.get("head", 0), total)


def _largest_layer(sizes: Mapping[str, float]) -> float:
    return max((size for name, size in sizes.items() if name.startswith("layers.")), default=0)
