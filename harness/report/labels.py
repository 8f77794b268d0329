"""What may differ between two rows of a folder, and how a row is called so that no two are called the same."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.records.schema import Record, Row

# Shown as columns where they vary over the rows, else said once: column and its header.
VARYING = {
    "model": "model",
    "parameters": "parameters",
    "engine": "engine",
    "precision": "precision",
    "world_size": "world",
    "global_batch": "batch",
    "seq_len": "seq_len",
    "micro_batch": "micro",
    "measured_on": "device",
    "launch": "launch",
    "repeat": "repeat",
    "data_parallel": "data_parallel",
    "zero_stage": "ZeRO",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "schedule": "schedule",
    "virtual_stages": "virtual",
    "layers_per_stage": "layers",
    "sequence_parallel": "sequence",
    "vocabulary_parallel": "vocabulary cut",
    "offload": "offload",
    "offload_activations": "activations away",
    "checkpointing_every": "every",
    "compile": "compiled",
    "loss_chunks": "loss chunks",
    "fused_optimizer": "fused",
    "attention": "attention",
    "dropout": "dropout",
    "otherwise": "otherwise",
}

# Strategy and world size say these, unless rows that share both differ in them.
SAID_BY_STRATEGY = (
    *("engine", "data_parallel", "zero_stage", "dp_replicate", "dp_shard", "tp", "cp", "pp"),
    *("schedule", "virtual_stages", "layers_per_stage", "sequence_parallel", "vocabulary_parallel"),
    *("offload", "offload_activations"),
)

# What a label leaves out, and what is worth no phrase where all rows share it.
DEFAULTS = {
    "offload_activations": False,
    "checkpointing_every": None,
    "compile": False,
    "loss_chunks": 1,
    "fused_optimizer": True,
    "attention": "flash",
    "dropout": 0.0,
}

_SAYS_WHAT_IT_IS = ("model", "engine", "precision", "measured_on", "launch", "schedule", "otherwise")

_MOST_KEYS = 3  # of a configuration that are told


def flattened(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Groups inside groups under dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def cell_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10**5 else str(value)


def value_text(name: str, value: Any) -> str:
    """A value of a column among others."""
    if name == "parameters":
        return f"{value / 1e6:.3g}M" if value >= 10**5 else f"{value} parameters"
    return str(value) if name in _SAYS_WHAT_IT_IS else f"{VARYING[name]} {cell_text(value)}"


def non_default(row: Row) -> dict[str, Any]:
    """What of a row is set and not as usual."""
    values = {name: row.get(name) for name in DEFAULTS}
    return {name: value for name, value in values.items() if value not in (None, DEFAULTS[name])}


def other_differences(records: Sequence[Record], varying: Sequence[str]) -> list[str | None]:
    """Of rows that no column tells apart, what of their configurations does: static_graph=true; others None."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, record in enumerate(records):
        row = record["row"]
        groups.setdefault((_name(row), *(row.get(name) for name in varying)), []).append(position)
    found: list[str | None] = [None] * len(records)
    for positions in (group for group in groups.values() if len(group) > 1):
        flats = [flattened(result_affecting_keys(records[position].get("config") or {})) for position in positions]
        keys = [key for key in dict.fromkeys(key for one in flats for key in one) if key != "repeat"]
        differing = [key for key in keys if any(one.get(key) != flats[0].get(key) for one in flats)]
        for position, one in zip(positions, flats, strict=True):
            parts = [f"{key.rsplit('.', 1)[-1]}={one.get(key, '-')}" for key in differing[:_MOST_KEYS]]
            found[position] = ", ".join(parts) or None
    return found


def labels(rows: Sequence[Row], varying: Sequence[str], otherwise: Sequence[str | None]) -> list[str]:
    """A label a row, no two the same, only as long as that needs: ddp, zero3 full, tp world 4, ddp compiled yes."""
    found = [_name(row) for row in rows]
    groups: dict[str, list[Row]] = {}
    for name, row in zip(found, rows, strict=True):
        groups.setdefault(name, []).append(row)
    differing = {name: [key for key in varying if _differ(alike, key)] for name, alike in groups.items()}
    for keys in differing.values():
        if "model" in keys and "parameters" in keys:
            keys.remove("parameters")  # the name says it
    found = _distinguished(found, [_details(row, differing[name]) for row, name in zip(rows, found, strict=True)])
    found = _distinguished(found, [text or "" for text in otherwise])
    return _distinguished(found, [row["run_id"] for row in rows])


def _differ(rows: Sequence[Row], key: str) -> bool:
    return len({row.get(key) for row in rows}) > 1


def _name(row: Row) -> str:
    checkpointing = row.get("checkpointing")
    return f"{row.get('strategy') or row['run_id']}{'' if checkpointing in (None, 'none') else f' {checkpointing}'}"


def _details(row: Row, differing: Sequence[str]) -> str:
    """What tells the row from those of its name, but for what is as usual."""
    shown = non_default(row)
    return " ".join(
        value_text(name, row[name])
        for name in differing
        if row.get(name) is not None and (name in shown or name not in DEFAULTS)
    )


def _distinguished(labels: Sequence[str], details: Sequence[str]) -> list[str]:
    counts = Counter(labels)
    return [
        f"{label} {detail}" if detail and counts[label] > 1 else label
        for label, detail in zip(labels, details, strict=True)
    ]


PEAK_PARTS = {
    "parameter": "parameters",
    "optimizer": "optimizer",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "rounding": "rounding",
    "unmatched": "unmatched",
}

STEP_PARTS = {
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "exposed_communication_seconds": "exposed communication",
    "idle_seconds": "pipeline idle",
    "other_seconds": "other",
}
