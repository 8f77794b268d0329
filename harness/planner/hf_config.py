"""A Hugging Face config.json of an architecture that the project's decoder has, read without torch."""

import json
from pathlib import Path
from typing import Any

from harness.config.values import GroupValues
from harness.util.errors import UserError

LLAMA_TYPES = ("llama", "mistral")  # whose layers are the family llama's; Mistral's sliding window is left out

_COMMON = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def decoder_values(model: GroupValues) -> GroupValues | None:
    """Return a model of family hf as the project's own decoder; None where its architecture is another one.

    Raises UserError for a path without a readable config.json.
    """
    if not model.get("path"):
        raise UserError("model.path=null: name the config.json of model=hf, or the folder that has it")
    path = Path(str(model["path"])).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        return _values(config, model, str(model.get("name") or path.resolve().parent.name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.path={path} is no readable config.json of a causal language model: {error}") from None


def _values(config: dict[str, Any], model: GroupValues, name: str) -> GroupValues | None:
    kind = config.get("model_type")
    if kind in LLAMA_TYPES:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        has_biases = config.get("attention_bias") or config.get("mlp_bias")
        if has_biases or head_dim * heads != config["hidden_size"] or config.get("hidden_act", "silu") != "silu":
            return None
        values = {key: config[key] for key in (*_COMMON, "intermediate_size")}
        values |= {"family": "llama", "num_key_value_heads": config.get("num_key_value_heads") or heads}
        values |= {"context_length": config["max_position_embeddings"], "dropout": 0.0}
    elif kind == "gpt2":
        width, heads = config["n_embd"], config["n_head"]
        values = {"family": "gpt", "hidden_size": width, "num_hidden_layers": config["n_layer"]}
        values |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": config["vocab_size"]}
        values |= {"intermediate_size": config.get("n_inner") or 4 * width, "context_length": config["n_positions"]}
        values |= {"dropout": config.get("resid_pdrop", 0.1)}
    else:
        return None
    values |= {"tie_word_embeddings": config.get("tie_word_embeddings", kind == "gpt2"), "parameters": 0}
    values |= {"name": name, "source": "its config.json", "attention": model.get("attention") or "flash"}
    changed = ("context_length", "dropout", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
    return values | {key: model[key] for key in changed if model.get(key) is not None}
