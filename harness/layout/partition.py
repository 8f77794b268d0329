"""The partition of a model along the tensor-parallel and the pipeline-parallel axis, without torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layer_spec import MATRIX_DIMS, SHARD_DIM, numel
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.util.text import UserError


def is_expert_weight(parameter: str) -> bool:
    """Return whether a parameter, by its plain name, is a weight of all experts."""
    return ".experts." in parameter


def is_layer_matrix(layer: int | None, shape: Sequence[int]) -> bool:
    """Return whether a parameter of this layer, or of none, is a matrix of it; embedding and head are in none."""
    return layer is not None and len(shape) == MATRIX_DIMS


def tp_shard_dim(parameter: str, model: ModelConfig, vocabulary_parallel: bool = True) -> int | None:
    """Return the dimension of a parameter, by its plain name, that tensor parallelism cuts; None if it stays whole.

    A layout may leave the vocabulary whole.
    """
    module, _, leaf = parameter.rpartition(".")
    style = model_profile(model).tensor_plan.get(module)
    if leaf == "bias":  # cut with the outputs that a rank computes alone; whole behind a sum over the ranks
        return 0 if style in ("column", "gathered") else None
    if style not in SHARD_DIM or (style == "vocabulary" and not vocabulary_parallel):
        return None
    return SHARD_DIM[style] + len(model_profile(model).parameter_shapes[parameter]) - MATRIX_DIMS


def fsdp_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dimension along which fully_shard divides a parameter of this shape on a model-parallel rank.

    It pads the first one, by much where there are fewer experts than shards; these are divided along their second one,
    as in torchtitan (models/common/moe, experts_shard_placement_fn), if it is a multiple, which torch needs there.
    """
    return int(len(shape) > MATRIX_DIMS and shape[0] < shards and shape[1] % shards == 0)


def fsdp_rows(shape: Sequence[int], shards: int) -> tuple[int, int]:
    """Return how many rows of a parameter fully_shard divides, and the elements of each."""
    rows = shape[fsdp_dim(shape, shards)]
    return rows, math.prod(shape) // rows


@dataclass(frozen=True)
class Stage:
    """A part of the model's depth: consecutive decoder layers, and at the ends the embedding or the head."""

    index: int
    count: int  # the number of stages of the whole model
    first_layer: int  # the index of its first layer in the whole model
    layers: int  # the number of its layers
    # Which neighbor is on the same rank, so that nothing is sent to it: the next stage (1), or the one before it (-1).
    local_neighbor: Literal[-1, 0, 1] = 0

    @property
    def holds_embedding(self) -> bool:
        """Whether this is the first stage, which starts from token ids."""
        return self.index == 0

    @property
    def holds_head(self) -> bool:
        """Whether this is the last stage, which has the final norm, the head and the loss."""
        return self.index == self.count - 1

    @property
    def layer_indices(self) -> range:
        """The indices of its layers in the whole model."""
        return range(self.first_layer, self.first_layer + self.layers)


def whole_model(model: ModelConfig) -> Stage:
    """Return the stage that is all of the model."""
    return Stage(0, 1, 0, model.num_hidden_layers)


def split_into_stages(model: ModelConfig, layout: Layout) -> list[Stage]:
    """Return the model's stages in order, as strategy.layers_per_stage says or else with parameters spread evenly.

    Raises UserError if there are fewer layers than stages, or if strategy.layers_per_stage does not make up the model.
    """
    return list(split_model(model, layout.pp, layout.virtual_stages, layout.layers_per_stage, layout.is_v_shaped))


@lru_cache(maxsize=512)
def split_model(
    model: ModelConfig, pp: int, virtual_stages: int, layers: tuple[int, ...] | None, is_v_shaped: bool
) -> tuple[Stage, ...]:
    """Return the stages of split_into_stages(), which depend on no more of a layout than this."""
    count, depth = pp * virtual_stages, model.num_hidden_layers
    times = f" x strategy.virtual_stages={virtual_stages}" if virtual_stages > 1 else ""
    if depth < count:
        raise UserError(
            f"strategy.pp={pp}{times} makes {count} stages of model.num_hidden_layers={depth}:"
            f" choose at least one layer per stage"
        )
    if layers is None:
        profile = model_profile(model)
        layer = numel(profile.layer_shapes)  # which stands for all of them
        head = numel(profile.head_shapes) + model.vocab_size * model.hidden_size * model.tie_word_embeddings
        layers = balanced_layers(depth, numel(profile.embedding_shapes) / layer, head / layer, count)
    if len(layers) != count or sum(layers) != depth or min(layers) < 1:
        raise UserError(
            f"strategy.layers_per_stage={list(layers)} is not {count} numbers (strategy.pp={pp}{times}) with the sum"
            f" {depth} (model.num_hidden_layers): choose such numbers, or null"
        )
    together: dict[int, Literal[-1, 1]] = {pp - 1: 1, pp: -1} if is_v_shaped else {}
    return tuple(Stage(i, count, sum(layers[:i]), size, together.get(i, 0)) for i, size in enumerate(layers))


def stages_of_rank(model: ModelConfig, layout: Layout, rank: int) -> list[Stage]:
    """Return the stages of a rank in the order of the model."""
    return stages_of_pp_rank(model, layout, layout.coordinates(rank)["pp"])


def stages_of_pp_rank(model: ModelConfig, layout: Layout, pp_rank: int) -> list[Stage]:
    """Return the stages of a rank of the pipeline in the order of the model."""
    stages = split_into_stages(model, layout)
    return [stages[index] for index in layout.stage_indices(pp_rank)]


def local_numel(model: ModelConfig, layout: Layout, stage: Stage, trained: bool = False) -> Mapping[str, float]:
    """Return the elements of each of a stage's parameters on one model-parallel rank, before data-parallel sharding.

    They are an even share: fractions where a dimension cannot be cut evenly. With `trained` frozen ones are left out.
    """
    return _local_numel(model, layout.tp, layout.vocabulary_tp, layout.ep, stage, trained)


@lru_cache(maxsize=1024)
def _local_numel(
    model: ModelConfig, tp: int, vocabulary_tp: int, ep: int, stage: Stage, trained: bool
) -> Mapping[str, float]:
    owned = parameters_of_stage(model, stage, trained)
    return MappingProxyType(
        {
            each.name: math.prod(each.shape) / (each.parts(tp, vocabulary_tp) * (ep if each.is_expert else 1))
            for each in owned
        }
    )


def local_sizes(model: ModelConfig, layout: Layout, stages: Iterable[Stage], trained: bool = False) -> list[float]:
    """Return the elements of local_numel() for the parameters of several stages, one after another."""
    return [size for stage in stages for size in local_numel(model, layout, stage, trained).values()]


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter with what decides its stage and its share on a tensor-parallel rank."""

    name: str
    shape: tuple[int, ...]
    dim: int | None  # the dimension that tensor parallelism cuts; None if it stays whole
    is_vocabulary: bool  # whether that is the vocabulary, which a layout may leave whole
    is_expert: bool  # whether its first dimension is that of experts, which expert parallelism divides
    layer: int | None  # the index of its layer
    is_embedding: bool
    is_copy: bool  # whether it is the last stage's own copy of a tied embedding, which is its head
    # What is gathered and reduced with it: its layer's index, `embedding` or `head`, which are one where they are tied.
    group: str

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix of a layer, which an optimizer may update by a rule of its own."""
        return is_layer_matrix(self.layer, self.shape)

    def parts(self, tp: int, vocabulary_tp: int) -> int:
        """Return the number of parts into which tensor parallelism cuts it."""
        if self.dim is None:
            return 1
        return vocabulary_tp if self.is_vocabulary else tp

    def local_shape(self, tp: int, vocabulary_tp: int, ep: int, place: int = 0) -> tuple[int, ...]:
        """Return the shape on the tensor-parallel rank of this place; the first one has most of it.

        A dimension that cannot be cut evenly has equal parts but for the last, as torch.chunk cuts it. Experts are
        divided evenly.
        """
        parts, sizes = self.parts(tp, vocabulary_tp), list(self.shape)
        if self.is_expert:
            sizes[0] //= ep
        if self.dim is not None and parts > 1:
            part = math.ceil(sizes[self.dim] / parts)
            sizes[self.dim] = max(0, min(part, sizes[self.dim] - place * part))
        return tuple(sizes)

    def is_in(self, stage: Stage) -> bool:
        """Return whether the parameter is in this stage."""
        if self.is_copy:
            return stage.holds_head and not stage.holds_embedding
        if self.layer is not None:
            return stage.first_layer <= self.layer < stage.first_layer + stage.layers
        return stage.holds_embedding if self.is_embedding else stage.holds_head


def parameters_of_stage(model: ModelConfig, stage: Stage, trained: bool = False) -> Iterator[ShardedParameter]:
    """Yield the parameters of a stage in the order of the model; with `trained` without those that are frozen."""
    own = (parameter for parameter in _sharded_parameters(model) if parameter.is_in(stage))
    return (parameter for parameter in own if not trained or model.adapter.trains(parameter.name))


@lru_cache(maxsize=16)
def _sharded_parameters(model: ModelConfig) -> tuple[ShardedParameter, ...]:
    profile, parameters = model_profile(model), []
    for name, shape in profile.parameter_shapes.items():
        layer, is_embedding = profile.layer_index(name), name in profile.embedding_shapes
        end = "embedding" if is_embedding and not model.tie_word_embeddings else "head"
        group = end if layer is None else str(layer)
        is_vocabulary = profile.tensor_plan.get(name.rpartition(".")[0]) == "vocabulary"
        dim = tp_shard_dim(name, model)
        is_expert = is_expert_weight(name)
        own = ShardedParameter(name, shape, dim, is_vocabulary, is_expert, layer, is_embedding, False, group)
        parameters.append(own)
    if model.tie_word_embeddings:
        parameters += [replace(each, is_copy=True) for each in parameters if each.is_embedding and each.is_vocabulary]
    return tuple(parameters)


def representative_stage(stage: Stage, period: int) -> Stage:
    """Return the stage that stands for all of a decoder whose layers are alike and that hold the same parts of it.

    `period` is the n of a property that every n-th layer of the whole model has. What a stage keeps and communicates
    depends on its number of layers, on embedding and head, and on where the period begins.
    """
    if stage.count == 1:
        return stage
    index = 0 if stage.holds_embedding else 2 if stage.holds_head else 1
    return Stage(index, 3, stage.first_layer % period, stage.layers, stage.local_neighbor)


@lru_cache(maxsize=128)
def local_shapes(model: ModelConfig, layout: Layout, stage: Stage, rank: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a stage's parameters on this rank, before data-parallel sharding."""
    cut = (layout.tp, layout.vocabulary_tp, layout.ep, layout.coordinates(rank)["tp"])
    return MappingProxyType({each.name: each.local_shape(*cut) for each in parameters_of_stage(model, stage)})


@lru_cache(maxsize=128)
def balanced_layers(depth: int, first: float, last: float, count: int) -> tuple[int, ...]:
    """Return the layers per stage for which the largest stage is as small as possible.

    `first` and `last` are the sizes of embedding and head in layers, added to the first and the last stage. Each layer
    after a stage's first goes to the smallest stage so far, of equal ones to the last, so that the squares of sizes
    have the least sum, too. Parameters are balanced, not time: an embedding counts as many layers as it has parameters,
    though it takes hardly any time.
    """
    layers, sizes = [1] * count, [1.0] * count
    sizes[0] += first
    sizes[-1] += last
    for _ in range(depth - count):
        smallest = min(reversed(range(count)), key=sizes.__getitem__)
        layers[smallest] += 1
        sizes[smallest] += 1
    return tuple(layers)


def balancing_weight(config: RunConfig, layout: Layout) -> float:
    """Return the weight of the loss that balances a sequence's experts, in the loss of a rank's whole step.

    Tensor-parallel ranks each add a part to the routers' gradients, which are summed over them.
    """
    sequences = config.train.global_batch // layout.dp
    return config.model.router_aux_loss_coef / (sequences * layout.tp)
