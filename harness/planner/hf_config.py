"""A Hugging Face model for a plan: as the project's own decoder where it is one, otherwise traced in a process.

This process imports no torch.
"""

import contextlib
import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.config.from_dict import GroupValues
from harness.config.model import HFModelInfo
from harness.config.model_files import config_file, require_library
from harness.records.provenance import versions
from harness.util.files import atomic_write_text
from harness.util.text import UserError, one_line

TRACE_SECONDS = 600  # the limit of a trace

# The keys of a config.json for the values of a model, by its family; Mistral's sliding window is left out.
_KEYS = {
    "llama": {
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "intermediate_size": "intermediate_size",
        "context_length": "max_position_embeddings",
    },
    "gpt": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "vocab_size": "vocab_size",
        "context_length": "n_positions",
    },
}
_KEYS["moe"] = _KEYS["llama"] | {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}

_FAMILIES = {"llama": "llama", "mistral": "llama", "mixtral": "moe", "gpt2": "gpt"}  # by model_type

# The settings of model=hf that count before its config.json.
_CHANGED = ("context_length", "dropout", "num_hidden_layers", "vocab_size", "tie_word_embeddings")


def hf_values(model: GroupValues, seq_len: int | None, cache: Path) -> GroupValues:
    """Return the values of a model of family hf, from its config.json alone or from a trace.

    Traces are file in the folder `cache`, by the hash of what they depend on. Raises UserError for a model that
    is not there, is no causal language model, or cannot be traced.
    """
    if not model.get("path"):
        raise UserError("model.path=null: name a config.json, a folder that has one, or a model in the hub")
    path = config_file(str(model["path"]))
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        # Of a model of the hub it is the last part of its name there.
        of_path = str(model["path"]).rpartition("/")[2] if "snapshots" in path.parts else path.resolve().parent.name
        name = str(model.get("name") or of_path)
        decoder = decoder_values(config, model, name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"model.path={model['path']} is no readable config.json of a causal language model: {one_line(error)}"
        ) from None
    return decoder or traced_values(config, model | {"path": str(path), "name": name}, seq_len, cache)


def decoder_values(config: dict[str, Any], model: GroupValues, name: str) -> GroupValues | None:
    """Return a model as the project's own decoder; None where its architecture is another one.

    Layers of the type llama may have biases, heads or an activation that the family's have not. Where the longest
    sequence is missing, the library has its own.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    missing = [value for value, key in _KEYS[family].items() if key not in config]
    if missing == ["context_length"]:
        return None
    if missing:
        raise ValueError(f"it has no {', '.join(_KEYS[family][value] for value in missing)}")
    values: GroupValues = {value: config[key] for value, key in _KEYS[family].items()}
    width, heads, is_gpt = values["hidden_size"], values["num_attention_heads"], family == "gpt"
    has_biases = config.get("attention_bias") or config.get("mlp_bias")
    is_other_head = (config.get("head_dim") or width // heads) * heads != width
    if not is_gpt and (has_biases or is_other_head or config.get("hidden_act", "silu") != "silu"):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rates = {"rope_theta": config.get("rope_theta") or rope.get("rope_theta")} | {
        key: config.get(key) for key in ("rms_norm_eps", "layer_norm_epsilon", "initializer_range")
    }
    values |= {key: rate for key, rate in rates.items() if rate is not None}
    values |= {
        "intermediate_size": values.get("intermediate_size") or config.get("n_inner") or 4 * width,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "dropout": config.get("resid_pdrop", 0.1) if is_gpt else 0.0,
        "tie_word_embeddings": config.get("tie_word_embeddings", is_gpt),
        "parameters": 0,
        "name": name,
        "family": family,
        "source": "its config.json" if kind == "default" else f"its config.json without rope_scaling={kind}",
        "attention": model.get("attention") or "flash",
    }
    return values | {key: model[key] for key in _CHANGED if model.get(key) is not None}


def traced_values(config: dict[str, Any], model: GroupValues, seq_len: int | None, cache: Path) -> GroupValues:
    """Return the values of a model that another process traces, or that one has traced before."""
    require_library()
    settings = {key: value for key, value in model.items() if key != "path"}
    of_packages = {package: versions()[package] for package in ("harness", "transformers", "torch")}
    facts = [entry.name for entry in dataclasses.fields(HFModelInfo)]
    depends_on = json.dumps([config, settings, seq_len, of_packages, facts], sort_keys=True)
    file = cache / "traces" / f"{hashlib.sha256(depends_on.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(FileNotFoundError, ValueError):  # a ValueError: half a file, of a machine that stopped
        values: GroupValues = json.loads(file.read_text())
        return values | {"path": model["path"]}
    request = json.dumps({"model": dict(model), "seq_len": seq_len})
    print(f"Tracing model.path={model['path']} once, in a process of its own …", file=sys.stderr)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "harness.models.hf"],
            input=request,
            capture_output=True,
            text=True,
            timeout=TRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"model.path={model['path']} was not traced within {TRACE_SECONDS} seconds: choose a smaller train.seq_len"
        ) from None
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"its process ended with status {ended.returncode}"]
        raise UserError(lines[-1])
    values = json.loads(ended.stdout.strip().splitlines()[-1])
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, json.dumps(values))
    return values
