"""The record of a run, everything that is known of it, with the types of its parts and the registry of columns.

Type, unit, title, meaning and use of every column of runs.csv are in columns.toml. Reports, tables and the reference
page docs/reference/columns.md take a column's facts from here. A row may have columns of its own beyond these, such as
at_peak_gradient_bytes: names that end in _bytes are whole numbers of bytes.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from harness.config.from_dict import ConfigValues
from harness.records.rank_report import RankReport, RunStatus
from harness.util.files import JsonObject

Cell = str | int | float | bool | None  # None: the value is unknown

Cells = dict[str, Cell]  # the values of some columns of a row, by the columns' names

# A whole row as it is read. The store has checked that every cell has its column's type.
Row = dict[str, Any]

SCHEMA_VERSION = 2  # version 1 has other names of columns: RENAMED_COLUMNS


class Commit(TypedDict):
    """The commit of the harness's sources."""

    commit: str
    dirty: bool  # whether the sources differ from it


class CheckEntry(TypedDict):
    """The largest deviation from the reference in one aspect; None is not finite, not measured, or without a bound."""

    deviation: float | None
    where: str
    floor: float | None
    bound: float | None


class ProofEntry(TypedDict, total=False):
    """The result of a run's proof. The deviations are missing where nothing was compared."""

    layout: Literal["proven", "failed"]
    reference: str  # what the run was compared with, or why it was not
    expected_communication_bytes: Sequence[Mapping[str, float]]  # of each rank, by axis and kind, by the papers
    padded_communication_bytes: Sequence[Mapping[str, float]]  # the same with uneven shares and padding, exactly
    floor_multiple: float  # how many noise floors a deviation may have
    checks: Sequence[CheckEntry]
    loss_bound: float  # in older records, which had a fixed bound
    gradient_bound: float
    problems: Sequence[str]


RecordParts = dict[str, Any]  # those of the record's parts that only some runs have, by their names


@dataclass(frozen=True)
class Record:
    """The record of one run. Parts that the file does not have are empty.

    `parts` are the names of the parts that the file has, in its order: a rejected run has neither layout nor proof. The
    keys of an entry are told where it is made: harness.metrics.columns and step_time, and harness.runner.record.
    """

    row: Row
    config: ConfigValues = field(default_factory=dict)
    layout: JsonObject | None = None  # None for a run whose layout could not be resolved
    rank_entries: list[JsonObject] = field(default_factory=list)  # the ranks' reports without their long lists
    environment: JsonObject = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    commit: Commit | None = None  # None outside a repository
    proof: ProofEntry = field(default_factory=ProofEntry)
    communication: list[JsonObject] = field(default_factory=list)  # of the rank that sends most, by operation
    traffic: list[JsonObject] = field(default_factory=list)  # of that rank by mesh axis, beside the formula's
    pipeline: list[JsonObject] = field(default_factory=list)  # the stages and idle time of every rank
    predicted_step: JsonObject | None = None  # None where the hardware is not described
    derivations: JsonObject = field(default_factory=dict)  # of the row's figures by column: harness.records.derivation
    notes: list[str] = field(default_factory=list)
    corpus: str = ""  # the fingerprint of the training data
    schema_version: int = SCHEMA_VERSION
    runs: Sequence["Record"] = ()  # the repeats that a merged record represents; empty in a file
    parts: Sequence[str] = ("row",)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build a record from the values of its file; unknown keys are ignored, and missing ones leave a part empty."""
        names = {_NAMES.get(key, key): value for key, value in values.items()}
        known = {name: value for name, value in names.items() if name in _FIELDS and value is not None}
        return cls(**known, parts=tuple(key for key in values if _NAMES.get(key, key) in _FIELDS))

    def to_json(self) -> JsonObject:
        """Return the values of the record's file."""
        return {key: getattr(self, _NAMES.get(key, key)) for key in self.parts}

    @cached_property
    def ranks(self) -> list[RankReport]:
        """The ranks' reports, without the long lists that only the ranks' own files have."""
        return [RankReport.from_json(entry) for entry in self.rank_entries]

    @property
    def run_id(self) -> str:
        """The name of the run and of its folder."""
        return str(self.row["run_id"])

    @property
    def status(self) -> RunStatus:
        """The status with which the run ended."""
        status: RunStatus = self.row["status"]
        return status

    @property
    def is_row_alone(self) -> bool:
        """Whether the record is a row of runs.csv, of which nothing else is known but what its columns say."""
        return "config" not in self.parts

    def with_row(self, **columns: Cell) -> "Record":
        """Return the record with other values in some columns of its row."""
        return dataclasses.replace(self, row=self.row | columns)


_NAMES = {"ranks": "rank_entries"}  # attributes whose key in the file is another

_FIELDS = {entry.name for entry in dataclasses.fields(Record)} - {"parts"}


# The present names of its columns, by their names in that version.
RENAMED_COLUMNS: dict[str, str] = {
    "in_flight": "max_in_flight_micro_batches",
    "bubble": "pipeline_bubble",
    "bubble_formula": "pipeline_bubble_theory",
    "disturbed": "noise_warning",
    "stale": "stale_reason",
    "outside_bytes": "non_torch_bytes",
    "allocation_retries": "num_alloc_retries",
    "out_of_memory_errors": "num_ooms",
    "last_allocated_bytes": "last_seen_allocated_bytes",
    "last_host_bytes": "last_seen_rss_bytes",
    "peak_host_bytes": "peak_rss_bytes",
    "phase": "failed_in_phase",
    "hardware_flops": "executed_flops",
    "seconds": "duration_seconds",
    "step_seconds_spread": "step_seconds_iqr_ratio",
}


def with_current_names(row: Row) -> Row:
    """Return a row of schema version 1 with the columns' current names."""
    return {RENAMED_COLUMNS.get(name, name): value for name, value in row.items()}


Aggregate = Literal["", "maximum", "median", "sum"]  # over ranks or repeats; "" where it is the same for all
Group = Literal[
    "run",
    "model",
    "layout",
    "batch",
    "options",
    "outcome",
    "training",
    "start",
    "checkpoint",
    "time",
    "throughput",
    "memory",
    "bytes",
]


@dataclass(frozen=True)
class Column:
    """One column of runs.csv."""

    name: str
    type: type
    group: Group
    title: str
    help: str
    unit: str = ""
    aggregate: Aggregate = ""
    better: Literal["", "higher", "lower"] = ""
    short: str = ""  # the title in labels and narrow tables; empty where the title is short enough

    @property
    def label(self) -> str:
        """The short title, or the title if there is none."""
        return self.short or self.title


_TYPES = {entry.__name__: entry for entry in (str, int, float, bool)}

COLUMNS = {  # by their names
    name: Column(name, _TYPES[facts.pop("type")], **facts)
    for name, facts in tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf-8")).items()
}


@cache
def column_type(name: str) -> type | None:
    """Return the type of a column's values; None for an unregistered column that is not in bytes: it can have any."""
    if name.endswith("_bytes"):
        return int
    return COLUMNS[name].type if name in COLUMNS else None


def columns_aggregated_by(aggregate: Aggregate) -> tuple[str, ...]:
    """Return the names of the columns that are aggregated in this way."""
    return tuple(name for name, entry in COLUMNS.items() if entry.aggregate == aggregate)
