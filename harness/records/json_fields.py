"""Dataclasses that are written to a file as JSON and read back, as the reports of ranks are."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from harness.records.tensor_shards import StateShard, TensorFingerprint

_AS_ARRAY = (TensorFingerprint, StateShard)  # written as JSON arrays, because there are many


def keyed(name: str, read: Any = None) -> Any:
    """Return metadata for a field that has another key in the file, or whose value is read by a function."""
    return {"key": name, "read": read}


class FromJson:
    """A frozen dataclass that is read from JSON: unknown keys are ignored, and missing ones leave the default."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build the dataclass from the values of a file."""
        known: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
            value = values.get(entry.metadata.get("key", entry.name))
            if value is not None:
                read = entry.metadata.get("read")
                known[entry.name] = read(value) if read else value
        return cls(**known)


def to_plain(value: Any) -> Any:
    """Return dataclasses and named tuples as the plain values that stand for them in a file."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = dataclasses.fields(value)
        return {e.metadata.get("key", e.name): to_plain(getattr(value, e.name)) for e in entries}
    if isinstance(value, tuple) and hasattr(value, "_asdict") and not isinstance(value, _AS_ARRAY):
        return {key: to_plain(entry) for key, entry in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: to_plain(entry) for key, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
