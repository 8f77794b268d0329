"""How many parameters a model has, and where: from its configuration alone."""

from harness.config import ModelConfig


def layer_parameter_count(model: ModelConfig) -> int:
    """Parameters of one decoder layer: q and o, k and v, three matrices of SwiGLU, two norms."""
    hidden, groups = model.hidden_size, model.num_key_value_heads * model.head_dim
    return 2 * hidden * hidden + 2 * hidden * groups + 3 * hidden * model.intermediate_size + 2 * hidden


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    matrices = 1 if model.tie_word_embeddings else 2
    embeddings = matrices * model.vocab_size * model.hidden_size
    return embeddings + model.num_hidden_layers * layer_parameter_count(model) + model.hidden_size


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by its plain name, as Hugging Face's Llama names them; a tied head is the embedding."""
    hidden, inner, groups = model.hidden_size, model.intermediate_size, model.num_key_value_heads * model.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (groups, hidden),
        "self_attn.v_proj": (groups, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (model.vocab_size, hidden)}
    for index in range(model.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    return shapes if model.tie_word_embeddings else shapes | {"lm_head.weight": (model.vocab_size, hidden)}
