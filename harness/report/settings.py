"""The settings in which rows differ, and those that they share."""

from collections.abc import Sequence
from typing import Any

from harness.records.schema import Row
from harness.report.comparability import group_by
from harness.report.labels import DEFAULTS, IMPLIED_BY_STRATEGY, VARYING, value_text
from harness.report.sentences import sentence


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
