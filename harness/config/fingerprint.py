"""The identity of a run: which parts of a configuration affect its result, and their hash."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from harness.config.command import COMMAND_KEYS
from harness.config.model import HFModelInfo, ModelConfig
from harness.config.schema import RunConfig
from harness.util.text import UserError, parse_bytes

NAME_BYTES = 160  # of the readable part of an id; file systems take 255 for a file's whole name

# By group, the keys that name, find or place something without changing any result.
_NO_IDENTITY = {
    "model": ("path",),
    "data": ("cache",),
    "cluster": ("name", "partition", "account", "time", "hardware"),
}

# What is said about the figures of a cluster's hardware, and its price. All else changes what a simulation finds.
_OF_FIGURES = {"sources", "fitted_to", "datasheet_only", "price_per_device_hour", "calibrated", "notes"}

# The keys of a model's trace that follow from its configuration, and are no part of a run's identity.
_DERIVED = ("repeated_flops", "modules_in_order", "traced_layers")

# By group, the keys that were added with defaults that every earlier run had.
_NEW_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "head_dim": None,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
        "routing": "learned",
        "adapter": {"name": "none", "r": 16, "lora_alpha": 32, "target_modules": None, "double_quant": True},
    },
    "strategy": {"ep": 1, "secondary_shards": 1, "context_parallel": "gather"},
    "checkpointing": {"saved_products": "all"},
    "optimizer": {"name": "adamw", "momentum": 0.0},
    "train": {"save": "none"},
    "precision": {"recipe": "none", "float8_all_gather": False},
}

_OLD_KEYS = {
    entry.name: entry.metadata["old_key"]
    for cls in (ModelConfig, HFModelInfo)
    for entry in dataclasses.fields(cls)
    if "old_key" in entry.metadata
}
_NEW_KEYS = {old: new for new, old in _OLD_KEYS.items()}


def _rename_keys(values: Any, new_names: Mapping[str, str]) -> Any:
    """Return the values of a model with the keys of itself and of its trace renamed."""
    if not isinstance(values, Mapping):
        return values
    return {
        new_names.get(key, key): _rename_keys(value, new_names) if key in ("hf_info", "asked") else value
        for key, value in values.items()
    }


def result_affecting_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a plain config dict that affect a run's result. Groups may be missing.

    A memory budget is in bytes, however it is written. Hardware is that of simulated devices; others are their own.
    """
    affecting = without_new_defaults({key: value for key, value in values.items() if key not in COMMAND_KEYS})
    for group, names in _NO_IDENTITY.items():
        if isinstance(affecting.get(group), Mapping):
            items = affecting[group].items()  # before there was the key memory_budget, no run had one
            affecting[group] = {k: v for k, v in items if k not in names and (k, v) != ("memory_budget", None)}
    if "model" in affecting:
        affecting["model"] = _rename_keys(affecting["model"], _NEW_KEYS)
        if isinstance(affecting["model"], dict) and isinstance(info := affecting["model"].get("hf_info"), Mapping):
            affecting["model"]["hf_info"] = {key: info[key] for key in info if key not in _DERIVED}
    if isinstance(cluster := values.get("cluster"), Mapping):
        affecting["cluster"] = _in_bytes(affecting["cluster"], "memory_budget")
        hardware = cluster.get("hardware")
        if values.get("launch") == "simulated" and isinstance(hardware, Mapping):
            played = {key: value for key, value in hardware.items() if key not in _OF_FIGURES}
            affecting["cluster"]["hardware"] = _in_bytes(played, "memory", "host_memory")
    return affecting


def _in_bytes(values: Mapping[str, Any], *sizes: str) -> dict[str, Any]:
    """Return the values with these sizes in bytes; those of a rejected combination may be no sizes."""
    result = dict(values)
    for key in values.keys() & {*sizes}:
        with suppress(UserError):
            result[key] = parse_bytes(values[key])
    return result


def without_new_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain config dict without what every run had before there were keys for it, so that runs keep their ids.

    That is a `launch` of real processes, with the keys that only other modes read, and the defaults of _NEW_DEFAULTS.
    """
    is_default = values.get("launch", "processes") in ("processes", "script")  # old records may say that it wrote one
    rest = {key: value for key, value in values.items() if not (is_default and key in ("launch", "simulate"))}
    for group, defaults in _NEW_DEFAULTS.items():
        if isinstance(rest.get(group), Mapping):
            rest[group] = {
                key: value for key, value in rest[group].items() if key not in defaults or value != defaults[key]
            }
    return {key: value for key, value in rest.items() if value or key != "optimizer"}  # a group of new keys alone


def with_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under the original names of their keys, so that runs keep their ids when a key is renamed."""
    return dict(values) | {"model": _rename_keys(values.get("model"), _OLD_KEYS)}


def make_run_id(config: RunConfig, device_name: str, world_size: int, corpus: str) -> str:
    """Return a run's id: readable names of its groups, and the hash of everything that affects its result.

    `corpus` is the fingerprint of the corpus.
    """
    environment = {"world_size": world_size, "device_name": device_name, "corpus": corpus}
    key = short_hash(with_old_keys(result_affecting_keys(config.to_dict())) | environment)
    return readable_id(config.strategy.name, config.checkpointing.name, config.model.name, f"w{world_size}", key=key)


def short_hash(values: Mapping[str, Any]) -> str:
    """Return the hash of plain values, in any order: 10 hexadecimal digits.

    A value that JSON does not have counts as its text.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:10]


def readable_id(*names: str, key: str) -> str:
    """Return the id made of these names and a hash, which is one folder's name whatever the names are.

    A character that is no letter, digit, `.`, `_`, `+` or `-` becomes `_`, as does a first dot, which would hide the
    folder, or hyphen, which would begin an option, and long names are cut: the hash tells runs apart.
    """
    text = re.sub(r"[^\w.+-]|^[.-]", "_", "-".join(names))
    return f"{text.encode()[:NAME_BYTES].decode(errors='ignore')}-{key}"
