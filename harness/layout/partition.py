"""Where each part of the model lies along the tensor and the pipeline axis: data beside the model, without torch."""

import math
from dataclasses import dataclass

from harness.config.schema import ModelConfig
from harness.layout.layout import Layout
from harness.layout.parameters import embedding_shapes, head_shapes, layer_parameter_count, numel, parameter_shapes
from harness.util.errors import UserError

# How tensor parallelism cuts a module's weight of shape (out, in) (Megatron-LM, arXiv 1909.08053). A column-parallel
# layer computes its own outputs from the whole input, the row-parallel one behind it sums over the ranks; embedding
# and head are cut along the vocabulary. What is not named is whole on every rank.
TENSOR_PLAN = {
    "embed_tokens": "vocabulary",
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
    "lm_head": "vocabulary",
}

# Of a weight; of a bias it is that of its outputs. gathered: column-parallel, its output made whole.
SHARD_DIM = {"vocabulary": 0, "column": 0, "gathered": 0, "row": 1}


def tp_style(module: str, model: ModelConfig) -> str | None:
    """How the plan cuts a module, by its path in the model; None if it stays whole."""
    if model.asked is not None:
        return model.asked.tensor_plan.get(module)
    return next((cut for name, cut in TENSOR_PLAN.items() if module == name or module.endswith(f".{name}")), None)


def tp_shard_dim(parameter: str, model: ModelConfig) -> int | None:
    """The dimension of a parameter, by its plain name, that tensor parallelism cuts; None if it stays whole."""
    module, _, what = parameter.rpartition(".")
    cut = tp_style(module, model)
    if what == "bias":  # of what a rank computes alone; behind a sum over the ranks it is whole
        return 0 if cut in ("column", "gathered") else None
    return None if cut is None else SHARD_DIM[cut]


def is_vocab_sharded(parameter: str, model: ModelConfig) -> bool:
    """Whether what tensor parallelism cuts of a parameter is the vocabulary."""
    return tp_style(parameter.rpartition(".")[0], model) == "vocabulary"


def tp_shard_dim_under(parameter: str, model: ModelConfig, layout: Layout) -> int | None:
    """The same under a layout, which may leave the vocabulary whole."""
    whole_vocabulary = is_vocab_sharded(parameter, model) and not layout.vocabulary_parallel
    return None if whole_vocabulary else tp_shard_dim(parameter, model)


def tp_shards(parameter: str, model: ModelConfig, layout: Layout) -> int:
    """Into how many parts tensor parallelism cuts a parameter."""
    return 1 if tp_shard_dim_under(parameter, model, layout) is None else layout.tp


@dataclass(frozen=True)
class Stage:
    """A part of the model's depth: decoder layers `first_layer` to `last_layer` and, at the ends, what lies there."""

    index: int
    count: int  # of stages in the whole model
    first_layer: int
    layers: int

    @property
    def holds_embedding(self) -> bool:
        return self.index == 0

    @property
    def holds_head(self) -> bool:
        """The final norm, the head and the loss."""
        return self.index == self.count - 1

    @property
    def layer_indices(self) -> range:
        return range(self.first_layer, self.first_layer + self.layers)

    def holds(self, parameter: str) -> bool:
        """Whether a parameter, by its plain name, is part of this stage; a tied head goes by the embedding's name."""
        owner, *rest = parameter.split(".")
        if owner == "layers":
            return int(rest[0]) in self.layer_indices
        return self.holds_embedding if owner in ("embed_tokens", "embed_positions") else self.holds_head


def whole_model(model: ModelConfig) -> Stage:
    """The stage that is all of the model."""
    return Stage(0, 1, 0, model.num_hidden_layers)


def split_into_stages(model: ModelConfig, layout: Layout) -> list[Stage]:
    """The model's stages in order: as strategy.layers_per_stage gives them, else with parameters spread evenly.

    Raises UserError if there are fewer layers than stages, or if what is given does not make up the model.
    """
    count, depth = layout.num_stages, model.num_hidden_layers
    times = f" x strategy.virtual_stages={layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    if depth < count:
        raise UserError(
            f"strategy.pp={layout.pp}{times} makes {count} stages of model.num_hidden_layers={depth}:"
            f" choose at least a layer a stage"
        )
    layers = layout.layers_per_stage
    if layers is None:
        layers = balanced_layers(depth, *embedding_and_head_in_layers(model), count)
    if len(layers) != count or sum(layers) != depth or min(layers) < 1:
        raise UserError(
            f"strategy.layers_per_stage={list(layers)} must be {count} numbers of 1 or more for strategy.pp={layout.pp}"
            f"{times}, and their sum model.num_hidden_layers={depth}: choose such, or null"
        )
    return [Stage(i, count, sum(layers[:i]), number) for i, number in enumerate(layers)]


def stages_of_rank(model: ModelConfig, layout: Layout, rank: int) -> list[Stage]:
    """The stages that a rank holds: every pp-th, so that virtual stages are spread over the depth."""
    return split_into_stages(model, layout)[layout.coordinates(rank)["pp"] :: layout.pp]


def local_numel(model: ModelConfig, layout: Layout, stage: Stage) -> dict[str, float]:
    """Elements of each of a stage's parameters on one of its tensor-parallel ranks, before data-parallel sharding."""
    shapes = parameter_shapes(model).items()
    return {name: math.prod(shape) / tp_shards(name, model, layout) for name, shape in shapes if stage.holds(name)}


def embedding_and_head_in_layers(model: ModelConfig) -> tuple[float, float]:
    """What embedding and head (with the final norm) hold, measured in parameters of a decoder layer."""
    layer = layer_parameter_count(model)
    return numel(embedding_shapes(model)) / layer, numel(head_shapes(model)) / layer


def balanced_layers(depth: int, first: float, last: float, count: int) -> tuple[int, ...]:
    """Layers a stage so that the fullest stage holds as little as possible, `first` and `last` counted at the ends.

    Among such splits the evenest, by sum of squares. Parameters are balanced, not time: an embedding counts as many
    layers as it has parameters, though it takes hardly any time.
    """
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}  # by layers placed so far
    for stage in range(count):
        extra = (first if stage == 0 else 0.0) + (last if stage == count - 1 else 0.0)
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for placed, (fullest, squares, split) in best.items():
            for number in range(1, depth - placed - (count - stage - 1) + 1):
                size = number + extra
                option = (max(fullest, size), squares + size * size, (*split, number))
                found[placed + number] = min(option, found.get(placed + number, option))
        best = found
    return best[depth][2]
