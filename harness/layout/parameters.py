"""How many parameters a model has, and where: from its configuration alone."""

import math
from collections.abc import Mapping

from harness.config.schema import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def layer_shapes(model: ModelConfig) -> Shapes:
    """Every parameter of one decoder layer by its name there; of a model that was asked its first layer's."""
    if model.asked is not None:
        first = f"{model.asked.layers[0]}."
        named = model.asked.shapes.items()
        return {name.removeprefix(first): shape for name, shape in named if name.startswith(first)}
    kind, hidden, inner = model.architecture, model.hidden_size, model.intermediate_size
    groups = model.num_key_value_heads * model.head_dim
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (groups, hidden),
        "self_attn.v_proj": (groups, hidden),
        "self_attn.o_proj": (hidden, hidden),
        **{f"mlp.{name}": (inner, hidden) for name in kind.widening},
        "mlp.down_proj": (hidden, inner),
    }
    found = norm_shapes("input_layernorm", model) | norm_shapes("post_attention_layernorm", model)
    for name, shape in matrices.items():
        found[f"{name}.weight"] = shape
        if kind.biases:
            found[f"{name}.bias"] = shape[:1]
    return found


def unrecomputed_shapes(model: ModelConfig) -> Shapes:
    """The parameters of what a layer's second forward does not run to its end: its last matrix."""
    if model.asked is not None:
        first = f"{model.asked.layers[0]}."
        ends = {path.removeprefix(first) for path in model.asked.unfinished if path.startswith(first)}
        return {name: shape for name, shape in layer_shapes(model).items() if name.rpartition(".")[0] in ends}
    return {name: shape for name, shape in layer_shapes(model).items() if name.startswith("mlp.down_proj")}


def norm_shapes(name: str, model: ModelConfig) -> Shapes:
    weight: Shapes = {f"{name}.weight": (model.hidden_size,)}
    return weight | ({f"{name}.bias": (model.hidden_size,)} if model.architecture.has_norm_biases else {})


def embedding_shapes(model: ModelConfig) -> Shapes:
    """What turns tokens into hidden states; of a model that was asked all but layers and head."""
    if model.asked is not None:
        named, head = model.asked.shapes.items(), head_shapes(model)
        return {name: shape for name, shape in named if name not in head and not model.asked.is_in_decoder_layer(name)}
    tokens: Shapes = {"embed_tokens.weight": (model.vocab_size, model.hidden_size)}
    positions: Shapes = {"embed_positions.weight": (model.context_length, model.hidden_size)}
    return tokens | (positions if model.architecture.learned_positions else {})


def head_shapes(model: ModelConfig) -> Shapes:
    """What turns hidden states into logits; a tied matrix is the embedding's."""
    if model.asked is not None:
        return {name: shape for name, shape in model.asked.shapes.items() if name.startswith(f"{model.asked.head}.")}
    head: Shapes = {} if model.tie_word_embeddings else {"lm_head.weight": (model.vocab_size, model.hidden_size)}
    return norm_shapes("norm", model) | head


def layer_parameter_count(model: ModelConfig) -> int:
    """Parameters of one decoder layer."""
    return numel(layer_shapes(model))


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    if model.asked is not None:
        return numel(model.asked.shapes)
    ends = numel(embedding_shapes(model)) + numel(head_shapes(model))
    return ends + model.num_hidden_layers * layer_parameter_count(model)


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Every parameter by its plain name, as Hugging Face's Llama names them; a tied head is the embedding."""
    if model.asked is not None:
        return model.asked.shapes
    layer = layer_shapes(model)
    layers = {f"layers.{i}.{name}": shape for i in range(model.num_hidden_layers) for name, shape in layer.items()}
    return embedding_shapes(model) | layers | head_shapes(model)
