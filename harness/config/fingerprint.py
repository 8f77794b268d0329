"""What makes two runs the same: which parts of a configuration affect a run's result, and their hash."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from harness.config.byte_size import parse_bytes
from harness.config.schema import RunConfig
from harness.util.errors import UserError

# What names, places and watches a run without changing its result: not part of its identity.
_NOT_IDENTITY = (
    *("name", "results_dir", "tracking", "timeout_seconds", "hang_seconds", "preflight", "force", "proof"),
    *("repeats", "measure", "sweep", "retry", "stop_after", "launch"),
)

_NOT_IDENTITY_OF = {"data": ("cache",), "cluster": ("name", "partition", "account", "time"), "model": ("path",)}


def result_affecting_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration in plain values, groups missing or not, what affects a run's result."""
    kept = {key: value for key, value in values.items() if key not in _NOT_IDENTITY}
    for group, names in _NOT_IDENTITY_OF.items():
        if isinstance(kept.get(group), Mapping):
            kept[group] = {key: value for key, value in kept[group].items() if key not in names}
    if isinstance(kept.get("cluster"), Mapping):
        kept["cluster"] = normalize_memory_budget(kept["cluster"])
    return kept


def normalize_memory_budget(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The memory budget however it is written; none at all leaves runs what they were before there was the key."""
    budget = cluster.get("memory_budget")
    rest = {key: value for key, value in cluster.items() if key != "memory_budget"}
    if budget is None:
        return rest
    try:
        return rest | {"memory_budget": parse_bytes(budget)}
    except UserError:  # of values that were refused
        return rest | {"memory_budget": budget}


def fingerprint(config: RunConfig, device_name: str, world_size: int, corpus: str) -> str:
    """Hash of everything that affects a run's result, the corpus by its fingerprint: 10 hexadecimal digits."""
    values = result_affecting_keys(config.to_dict()) | {
        "world_size": world_size,
        "device_name": device_name,
        "corpus": corpus,
    }
    return short_hash(values)


def short_hash(values: Mapping[str, Any]) -> str:
    """Of plain values in any order: 10 hexadecimal digits. What is no JSON counts as its text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:10]


def make_run_id(config: RunConfig, device_name: str, world_size: int, corpus: str) -> str:
    """What is run, readable, and the hash of all that affects its result."""
    key = fingerprint(config, device_name, world_size, corpus)
    return "-".join((config.strategy.name, config.checkpointing.name, config.model.name, f"w{world_size}", key))
