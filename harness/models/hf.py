"""Models of Hugging Face's transformers library, from a local configuration and with random weights, without a network.

The parent traces a model once, built of fake tensors, for its shapes, tensor-parallel plan and operations. Ranks build
it from the same configuration, with parameters on the meta device and with the values of its buffers (rotary
frequencies, masks).
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from harness.config.from_dict import GroupValues, require
from harness.config.model import ModelConfig
from harness.models.hf_library import ATTENTION_IMPLEMENTATIONS, load_hf_config
from harness.models.hf_tracing import trace_model
from harness.util.errors import UserError, run_command
from harness.util.text import one_line

# Keys of the built-in families, for which a configuration of the library has its own keys.
MODEL_KEYS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "initializer_range")


def fill_model_config(model: GroupValues, seq_len: int | None) -> GroupValues:
    """Return the values of conf/model/hf.yaml, filled with those of the model at `path`.

    Raise UserError if there is no such model, or if it is not a causal language model.
    """
    path = model.get("path")
    if not path:
        raise UserError("model.path is missing: name a folder with a config.json, or such a file")
    values = read_config_json(Path(str(path)).expanduser())
    for key in ("tie_word_embeddings", "vocab_size", "num_hidden_layers"):
        if model.get(key) is not None:
            values[key] = model[key]
    config = load_hf_config(values, path)
    if model.get("dropout") is not None:
        set_dropout(config, float(model["dropout"]), path)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(ModelConfig)}
    for key in MODEL_KEYS:
        value, rule = model.get(key, defaults[key]), "cannot be set for model=hf: set it in the file at model.path"
        require(value == defaults[key], f"model.{key}", value, f"{rule}={path}")
    sizes = {key: getattr(config, key, None) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise UserError(f"model.path={path}: its configuration has no {key}; choose a decoder that has it")
    context = model.get("context_length") or getattr(config, "max_position_embeddings", None) or seq_len
    if not isinstance(context, int):
        raise UserError(f"model.path={path} has no max_position_embeddings: set model.context_length")
    attention = model.get("attention") or "flash"
    hf_info = trace_model(config, ATTENTION_IMPLEMENTATIONS.get(attention, attention), seq_len or context, path)
    count = sum(torch.Size(shape).numel() for shape in hf_info.shapes.values())
    return {
        **sizes,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "context_length": context,
        "initializer_range": float(getattr(config, "initializer_range", 0.02)),
        "parameters": count,
        "source": f"the Hugging Face configuration of model type {config.model_type}",
        "family": "hf",
        "attention": attention,
        "path": str(path),
        "name": model.get("name") or default_model_name(Path(str(path)).expanduser(), values, count),
        "dropout": max(dropout_fields(config).values(), default=0.0),
        "hf_info": vars(hf_info),
    }


def read_config_json(path: Path) -> dict[str, Any]:
    """Return the values of the config.json at `path` or in that folder; raise UserError if it cannot be read."""
    require(path.exists(), "model.path", path, "does not exist: name a folder with a config.json, or such a file")
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={path} has no readable config.json ({one_line(error)}): name a folder that has one"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"model.path={path} has no model_type: name the config.json of a Hugging Face model")
    return values


def dropout_fields(config: Any) -> dict[str, float]:
    """Return every dropout probability above 0 in the library's configuration, by its key."""
    items = ((key, value) for key, value in config.to_dict().items() if re.search(r"dropout|pdrop|layerdrop", key))
    other_heads = ("classifier", "summary")  # a causal language model has none of these heads
    numbers = {
        key: value for key, value in items if not key.startswith(other_heads) and isinstance(value, (int, float))
    }
    return {key: float(value) for key, value in numbers.items() if value > 0}


def set_dropout(config: Any, probability: float, path: object) -> None:
    """Set every dropout probability of the library's configuration; raise UserError if it has none to set."""
    fields = dropout_fields(config)
    if probability and not fields:
        raise UserError(f"model.dropout={probability}: model.path={path} has no dropout of its own; choose null or 0")
    for key in fields:
        setattr(config, key, probability)


def default_model_name(path: Path, values: dict[str, Any], parameters: int) -> str:
    """Return the folder's name, or the configuration's own name, or its type and size."""
    name = path.name if path.is_dir() else str(values.get("_name_or_path") or "").rstrip("/").rsplit("/")[-1]
    size = next(
        f"{parameters / unit:.3g}{suffix}"
        for unit, suffix in ((1e9, "b"), (1e6, "m"), (1e3, "k"), (1, ""))
        if parameters >= unit
    )
    return re.sub(r"[^A-Za-z0-9._-]", "_", name) or f"{values['model_type']}_{size}"


def trace() -> None:
    """Print the values of the model on standard input, filled in from its trace, as JSON. Raises UserError.

    `harness plan` starts a process for it (`python -m harness.models.hf`), so that it never imports torch itself.
    """
    request = json.load(sys.stdin)
    print(json.dumps(fill_model_config(request["model"], request["seq_len"])))


if __name__ == "__main__":
    sys.exit(run_command(trace))
