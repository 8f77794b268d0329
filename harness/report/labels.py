"""Labels and titles: the columns that may differ between rows, a unique label for each row, and the parts of a bar."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import flattened
from harness.config.strategy import DEGREES
from harness.cost_model.parts import STEP_PARTS
from harness.records.schema import COLUMNS, Record, Row
from harness.util.text import sanitize

# The strategy and the world size determine these columns, unless rows that share both differ in them.
IMPLIED_BY_STRATEGY = (
    *("engine", "data_parallel", "zero_stage", *DEGREES),
    *("schedule", "virtual_stages", "layers_per_stage", "sequence_parallel", "vocabulary_parallel", "context_parallel"),
    *("offload", "offload_activations", "secondary_shards"),
)

OTHER_OPTIONS = "other options"  # a column that only frames have: keys without a column that differ

# The columns that are shown where they vary between the rows and mentioned once where they do not.
VARYING = (
    *("model", "adapter", "adapter_rank", "parameters", "engine", "precision"),
    *("world_size", "global_batch", "seq_len", "micro_batch"),
    *("measured_on", "launch", "repeat", *IMPLIED_BY_STRATEGY[1:]),
    *("checkpointing_every", "saved_products", "compile", "loss_chunks"),
    *("optimizer", "fused_optimizer", "attention", "dropout"),
    *("routing", "save", "recipe", "float8_all_gather", OTHER_OPTIONS),
)

# Values that a label leaves out, and that are not mentioned where all rows share them.
DEFAULTS = {
    "offload_activations": False,
    "checkpointing_every": None,
    "saved_products": None,
    "context_parallel": None,
    "secondary_shards": None,
    "compile": False,
    "loss_chunks": 1,
    "optimizer": "adamw",
    "fused_optimizer": True,
    "attention": "flash",
    "dropout": 0.0,
    "adapter": None,
    "adapter_rank": None,
    "routing": "learned",
    "save": None,
    "recipe": None,
    "float8_all_gather": None,
}

# Columns whose values need no title in front of them.
_SELF_EXPLANATORY = (
    *("strategy", "checkpointing", "model", "engine", "precision", "optimizer", "measured_on", "launch", "schedule"),
    *("adapter", OTHER_OPTIONS),
)

_MOST_KEYS = 3  # of a configuration that a label has

STEP_TITLES = {name: COLUMNS[name].title for name in STEP_PARTS}


def column_title(name: str, short: bool = False) -> str:
    """Return the title of a column of VARYING, or the name of a column that the registry does not have."""
    if name == OTHER_OPTIONS:
        return "other options"
    if name not in COLUMNS:
        return name
    return COLUMNS[name].label if short else COLUMNS[name].title


def cell_text(value: Any) -> str:
    """Return a value as a table shows it: yes or no, and large numbers in groups of three digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10**5 else str(value)


def value_text(name: str, value: Any) -> str:
    """Return the value of a column as a phrase that names the column where the value alone is not clear."""
    if name == "parameters":
        unit, size = ("B", 1e9) if value >= 10**9 else ("M", 1e6)
        return f"{value / size:.3g}{unit}" if value >= 10**5 else f"{value} parameters"
    if name == "checkpointing_every":
        return f"in 1 of {value} layers"
    if name == "world_size":
        return f"on {value} rank{'s' if value != 1 else ''}"
    return str(value) if name in _SELF_EXPLANATORY else f"{column_title(name, short=True)} {cell_text(value)}"


def non_default(row: Row) -> dict[str, Any]:
    """Return the values of a row that are known and differ from DEFAULTS."""
    values = {name: row.get(name) for name in DEFAULTS}
    return {name: value for name, value in values.items() if value not in (None, DEFAULTS[name])}


def other_differences(records: Sequence[Record], varying: Sequence[str]) -> list[str | None]:
    """Return the differing configuration keys, such as static_graph=true, of rows that no column distinguishes.

    The entry of a row that some column distinguishes is None.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, record in enumerate(records):
        row = record.row
        groups.setdefault((_name(row), *(row.get(name) for name in varying)), []).append(position)
    differences: list[str | None] = [None] * len(records)
    for positions in (group for group in groups.values() if len(group) > 1):
        configs = [flattened(result_affecting_keys(records[position].config)) for position in positions]
        keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key != "repeat"]
        differing = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
        for position, config in zip(positions, configs, strict=True):
            parts = [f"{key.rsplit('.', 1)[-1]}={config.get(key, '-')}" for key in differing[:_MOST_KEYS]]
            differences[position] = ", ".join(parts) or None
    return differences


def labels(rows: Sequence[Row], varying: Sequence[str]) -> list[str]:
    """Return a unique label for each row, as short as possible, on one line.

    Examples are `ddp`, `zero3 + full checkpointing`, `tp on 4 ranks` and `ddp compiled yes`. Rows that no column
    distinguishes are told apart by OTHER_OPTIONS.

    Args:
        rows: The rows to name.
        varying: The columns that differ between the rows.
    """
    strategies, kinds = ({row.get(name) for row in rows} for name in ("strategy", "checkpointing"))
    # The report says once what checkpointing all have.
    is_shared = len(strategies) > 1 and len(kinds) == 1 and "checkpointing_every" not in varying
    row_labels = [str(row.get("strategy") or row["run_id"]) if is_shared else _name(row) for row in rows]
    groups: dict[str, list[Row]] = {}
    for name, row in zip(row_labels, rows, strict=True):
        groups.setdefault(name, []).append(row)
    differing = {name: distinguishing(group, varying) for name, group in groups.items()}
    details = [_details(row, differing[name]) for row, name in zip(rows, row_labels, strict=True)]
    row_labels = _distinguish(row_labels, details)
    row_labels = [sanitize(label) for label in _distinguish(row_labels, [row[OTHER_OPTIONS] or "" for row in rows])]
    return _distinguish(row_labels, [row["run_id"] for row in rows])


def distinguishing(rows: Sequence[Row], varying: Sequence[str]) -> list[str]:
    """Return the columns that together tell these rows apart, without those that others before them imply.

    Of the parallel degrees all that differ are among them if one is.
    """
    chosen: list[str] = []
    groups: list[tuple[Any, ...]] = [()] * len(rows)
    for key in varying:
        finer = [(*group, row.get(key)) for group, row in zip(groups, rows, strict=True)]
        is_finer = len(set(finer)) > len(set(groups))
        has_degree = key in DEGREES and not set(DEGREES).isdisjoint(chosen) and len({row.get(key) for row in rows}) > 1
        if is_finer or has_degree:
            chosen.append(key)
            groups = finer
    return chosen


def _name(row: Row) -> str:
    """Return a row's strategy with its checkpointing, such as `ddp` and `zero3 + full checkpointing`."""
    kind, name = row.get("checkpointing"), str(row.get("strategy") or row["run_id"])
    return name if kind in (None, "none") else f"{name} + {kind} checkpointing"


def _details(row: Row, differing: Sequence[str]) -> str:
    """Return what distinguishes the row from others of its name, without what has its default value."""
    shown = non_default(row)
    return " ".join(
        value_text(name, row[name])
        for name in differing
        if row.get(name) is not None and (name in shown or name not in DEFAULTS)
    )


def _distinguish(labels: Sequence[str], details: Sequence[str]) -> list[str]:
    """Return the labels, with the details behind those that several rows have."""
    counts = Counter(labels)
    return [
        f"{label} {detail}" if detail and counts[label] > 1 else label
        for label, detail in zip(labels, details, strict=True)
    ]
