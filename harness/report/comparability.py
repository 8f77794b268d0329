"""The keys that comparable runs share, for a ratio, a claim, repeats or a curve; and the settings of runs."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import orjson

from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import ConfigValues
from harness.config.strategy import DEGREES
from harness.records.provenance import version_differences
from harness.records.schema import Record, Row
from harness.report.labels import DEFAULTS, IMPLIED_BY_STRATEGY, VARYING, value_text
from harness.report.text import sentence

T = TypeVar("T")

# Runs are comparable, so that a ratio between them is meaningful, if all of these columns are equal.
_SETTING = ("model", "parameters", "precision", "global_batch", "seq_len", "measured_on", "launch")

# A claim is about one difference alone, so that these columns have to be equal too.
_CLAIM_SETTING = (*_SETTING, "micro_batch", "offload_activations")

# The columns that say how a run divides the model and the batch. Runs with equal values run the same strategy.
PARTITION_COLUMNS = (
    *("strategy", "engine", "zero_stage", "world_size", *DEGREES),
    *("schedule", "virtual_stages", "layers_per_stage", "sequence_parallel", "offload"),
    *("data_parallel", "vocabulary_parallel", "secondary_shards", "context_parallel"),
)

EQUAL_BYTES = 1e-3  # relative: sizes that differ by less are equal, such as gradients with and without their norm

# The columns known before a run starts. Rows without a configuration are distinguished by these columns alone.
_CONFIGURED_COLUMNS = ("strategy", "checkpointing", "parameters", *(name for name in VARYING if name != "repeat"))

# The columns in which the points of a curve may be equal; the first two name the curve.
CURVE_COLUMNS = ("strategy", "checkpointing", "parameters", *VARYING)


def comparability_key(row: Row) -> tuple[Any, ...]:
    """Return a key that is equal for rows whose figures can be compared, on whatever number of ranks."""
    return tuple(row.get(name) for name in _SETTING)


def is_measured(row: Row) -> bool:
    """Return whether every rank was a process, so that its figures are measured; old rows do not say how ranks ran."""
    return row.get("launch") in (None, "processes")


def choice_key(row: Row) -> tuple[Any, ...]:
    """Return a key that is equal for rows a reader may choose between: comparable and on as many ranks."""
    return (*comparability_key(row), row.get("world_size"))


def claim_key(record: Record) -> str:
    """Return a key that is equal for records that a claim may compare: the same model, training, versions and data.

    One of them may have adapters beside the model.
    """
    own_parameters = record.row.get("frozen_parameters") or record.row.get("parameters")
    columns = [own_parameters, *(record.row.get(name) for name in _CLAIM_SETTING if name != "parameters")]
    model = {key: value for key, value in record.config.get("model", {}).items() if key != "adapter"}
    training = [model, record.config.get("train")]
    return key_text([columns, *training, record.versions, record.corpus])


def key_text(values: Any) -> str:
    """Return plain values as text that is equal for equal values, in whatever order their keys are."""
    try:  # many times as fast as json, but for texts that are no Unicode and integers beyond 64 bits
        return orjson.dumps(values, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return json.dumps(values, sort_keys=True, default=str)


def program_key(line: Record) -> str | None:
    """Return a key that is equal for configurations that run the same program; None where the layout is not recorded.

    It has the resolved layout without what a single pipeline stage or a single tensor-parallel or
    context-parallel rank ignores, the engine's options, and all other keys of the configuration that affect results.
    """
    if not line.layout or not line.config:
        return None
    config = result_affecting_keys(line.config)
    ignored = [key for degree, keys in _IGNORED.items() if line.layout.get(degree) == 1 for key in keys]
    layout = {key: value for key, value in line.layout.items() if key not in ignored}
    layout |= {"secondary_shards": layout.get("secondary_shards", 1)}  # older layouts have none
    strategy = config.get("strategy") or {}
    options = {key: strategy.get(key) for key in ("literature", "options")}
    others = {key: value for key, value in config.items() if key not in ("strategy", "repeat", "world_size")}
    return key_text([layout, options, others])


# The keys of a layout that a single pipeline stage and a single tensor-parallel or context-parallel rank ignore.
_IGNORED = {
    "pp": ("schedule", "virtual_stages", "layers_per_stage"),
    "tp": ("sequence_parallel", "vocabulary_parallel"),
    "cp": ("context_parallel",),
}


def repeat_key(record: Record) -> str:
    """Return a key that is equal for repeats: records with the same versions that differ in nothing but `repeat`."""
    config = {key: value for key, value in result_affecting_keys(record.config).items() if key != "repeat"}
    configured = [record.row.get(name) for name in _CONFIGURED_COLUMNS]
    host = [record.environment.get(key) for key in ("device_name", "cores")]
    return key_text([config, configured, host, version_differences(record)])


def curve_key(row: Row, config: ConfigValues, free: tuple[str, ...]) -> tuple[Any, ...]:
    """Return a key that is equal for the points of one curve.

    They are equal in all columns that distinguish rows except the columns `free`, which change along the curve, and in
    the groups `model` and `strategy` of their configurations, some of whose keys have no column. The values of
    CURVE_COLUMNS without `free` come first, in that order.
    """
    options = [_without(config.get(name), free) for name in ("model", "strategy")]
    return (*(row.get(name) for name in curve_columns(free)), repr(options))


def _without(values: Any, free: Sequence[str]) -> Any:
    """Return a value as it is, or a group of keys without these."""
    if not isinstance(values, dict):
        return values
    return {key: _without(value, free) for key, value in values.items() if isinstance(value, dict) or key not in free}


@cache
def curve_columns(free: tuple[str, ...]) -> list[str]:
    """Return the columns in which the points of one curve are equal."""
    return [name for name in CURVE_COLUMNS if name not in free]


def group_by(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return the items by their keys, groups and members in the order in which they came."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _settings(rows: Sequence[Row], name: str) -> list[Any]:
    """Return the different values of a setting; None is one of them where it is the default."""
    values = dict.fromkeys(row.get(name) for row in rows)
    return [value for value in values if value is not None or DEFAULTS.get(name, "") is None]


def varying_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that differ between rows, without those that strategy and ranks determine."""
    by_strategy = group_by(rows, lambda row: (row.get("strategy"), row.get("world_size")))
    alike = [members for key, members in by_strategy.items() if None not in key and len(members) > 1]

    def varies(name: str) -> bool:
        if name in IMPLIED_BY_STRATEGY:
            return any(len({row.get(name) for row in members} - {None}) > 1 for members in alike)
        return len(_settings(rows, name)) > 1

    return list(filter(varies, VARYING))


def shared_settings(rows: Sequence[Row]) -> str:
    """Return the settings that all rows share; settings that vary are left to the columns."""
    distinct = {name: _settings(rows, name) for name in (*VARYING, "parameters", "checkpointing")}
    shared = {name: values[0] for name, values in distinct.items() if len(values) == 1}
    special = [name for name, default in DEFAULTS.items() if shared.get(name, default) != default]
    return sentence(
        "shared_settings", shared=shared, special={name: value_text(name, shared[name]) for name in special}
    )
