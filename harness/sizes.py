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


def group_parameter_counts(model: ModelConfig) -> list[int]:
    """Parameters of the groups that sharding gathers whole, largest first: every layer, the embedding, the head."""
    matrix = model.vocab_size * model.hidden_size
    ends = [matrix + model.hidden_size] if model.tie_word_embeddings else [matrix, matrix + model.hidden_size]
    return sorted([*ends, *[layer_parameter_count(model)] * model.num_hidden_layers], reverse=True)
