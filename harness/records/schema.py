"""The record of a run: everything that is known of it, whatever its end."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from harness.records.rank_report import RankReport

Row = dict[str, Any]  # the columns of one run, by name: harness.records.columns

SCHEMA_VERSION = 2  # version 1 has other names of columns: harness.records.columns.RENAMED_COLUMNS

STATUSES = ("ok", "oom", "refused", "timeout", "error", "interrupted")


@dataclass(frozen=True)
class Record:
    """The record of one run. Parts that the file does not have are empty.

    `parts` are the names of the parts that the file has, in its order: a rejected run has neither layout nor proof.
    """

    row: Row
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] | None = None  # None for a run whose layout could not be resolved
    rank_entries: list[dict[str, Any]] = field(default_factory=list)  # the ranks' reports without their long lists
    environment: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    commit: dict[str, Any] | None = None  # of the harness's sources; None outside a repository
    proof: dict[str, Any] = field(default_factory=dict)
    communication: list[dict[str, Any]] = field(default_factory=list)  # of the rank that sends most, by operation
    traffic: list[dict[str, Any]] = field(default_factory=list)  # of that rank by mesh axis, beside the formula's
    pipeline: list[dict[str, Any]] = field(default_factory=list)  # the stages and idle time of every rank
    notes: list[str] = field(default_factory=list)
    corpus: str = ""  # the fingerprint of the training data
    schema_version: int = SCHEMA_VERSION
    runs: Sequence["Record"] = ()  # the repeats that a merged record stands for; empty in a file
    parts: Sequence[str] = ("row",)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build a record from the values of its file; unknown keys are ignored, and missing ones leave a part empty."""
        names = {_NAMES.get(key, key): value for key, value in values.items()}
        known = {name: value for name, value in names.items() if name in _FIELDS and value is not None}
        return cls(**known, parts=tuple(key for key in values if _NAMES.get(key, key) in _FIELDS))

    def to_json(self) -> dict[str, Any]:
        """Return the values of the record's file."""
        return {key: getattr(self, _NAMES.get(key, key)) for key in self.parts}

    @cached_property
    def ranks(self) -> list[RankReport]:
        """The ranks' reports, without the long lists that stand in the ranks' own files only."""
        return [RankReport.from_json(entry) for entry in self.rank_entries]

    @property
    def run_id(self) -> str:
        """The name of the run and of its folder."""
        return str(self.row["run_id"])

    @property
    def status(self) -> str:
        """How the run ended, one of STATUSES."""
        return str(self.row["status"])

    def with_row(self, **columns: Any) -> "Record":
        """Return the record with other values in some columns of its row."""
        return dataclasses.replace(self, row=self.row | columns)


_NAMES = {"ranks": "rank_entries"}  # attributes that are called otherwise than the key in the file

_FIELDS = {entry.name for entry in dataclasses.fields(Record)} - {"parts"}
