"""Models of Hugging Face's transformers library, from a local configuration and with random weights: never a network.

The parent asks a model once, built of fake tensors, for its shapes, plan and operations; ranks build it from the same
configuration, parameters without memory and buffers (rotary frequencies, masks) with their values.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import ModelConfig
from harness.models.hf_library import ATTENTION_IMPLEMENTATIONS, load_hf_config
from harness.models.hf_tracing import trace_model
from harness.util.errors import UserError
from harness.util.text import one_line

# Keys of our own families, which a configuration of the library's says in its own words.
MODEL_KEYS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "initializer_range")


def fill_model_config(model: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """The values of conf/model/hf.yaml with all that the model at `path` says of itself.

    Raises UserError if there is none, or if it is no causal language model.
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
        if model.get(key, defaults[key]) != defaults[key]:
            raise UserError(
                f"model.{key}={model[key]} is no key of model=hf: choose it in the file at model.path={path}"
            )
    sizes = {key: getattr(config, key, None) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise UserError(f"model.path={path}: its configuration says no {key}, choose a decoder that has it")
    context = model.get("context_length") or getattr(config, "max_position_embeddings", None) or seq_len
    if not isinstance(context, int):
        raise UserError(f"model.path={path} says no max_position_embeddings: give model.context_length a value")
    attention = model.get("attention") or "flash"
    asked = trace_model(config, ATTENTION_IMPLEMENTATIONS.get(attention, attention), seq_len or context, path)
    count = sum(torch.Size(shape).numel() for shape in asked.shapes.values())
    return {
        **sizes,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "context_length": context,
        "initializer_range": float(getattr(config, "initializer_range", 0.02)),
        "parameters": count,
        "source": f"its own configuration, of the type {config.model_type}",
        "family": "hf",
        "attention": attention,
        "path": str(path),
        "name": model.get("name") or default_model_name(Path(str(path)).expanduser(), values, count),
        "dropout": max(dropout_fields(config).values(), default=0.0),
        "asked": vars(asked),
    }


def read_config_json(path: Path) -> dict[str, Any]:
    """A config.json, by itself or in a folder."""
    if not path.exists():
        raise UserError(f"model.path={path} does not exist: name a folder with a config.json, or such a file")
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path} holds no readable config.json ({one_line(error)}): name one") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"model.path={path} says no model_type: name the config.json of a Hugging Face model")
    return values


def dropout_fields(config: Any) -> dict[str, float]:
    """Every share of something that the model drops, above 0."""
    named = ((key, value) for key, value in config.to_dict().items() if re.search(r"dropout|pdrop|layerdrop", key))
    ends = ("classifier", "summary")  # of heads for other purposes
    shares = {key: value for key, value in named if not key.startswith(ends) and isinstance(value, (int, float))}
    return {key: float(value) for key, value in shares.items() if value > 0}


def set_dropout(config: Any, share: float, path: object) -> None:
    found = dropout_fields(config)
    if share and not found:
        raise UserError(
            f"model.dropout={share}: model.path={path} says of nothing that it is dropped, choose null or 0"
        )
    for key in found:
        setattr(config, key, share)


def default_model_name(path: Path, values: dict[str, Any], parameters: int) -> str:
    """The folder's name, or what the configuration calls itself, or its type and size."""
    given = path.name if path.is_dir() else str(values.get("_name_or_path") or "").rstrip("/").rsplit("/")[-1]
    size = next(
        f"{parameters / unit:.3g}{mark}"
        for unit, mark in ((1e9, "b"), (1e6, "m"), (1e3, "k"), (1, ""))
        if parameters >= unit
    )
    return re.sub(r"[^A-Za-z0-9._-]", "_", given) or f"{values['model_type']}_{size}"
