"""The registry of columns: type, unit, title, meaning and use of every column of runs.csv, read from columns.toml.

Reports, tables and the reference page docs/reference/columns.md take a column's facts from here. A row may have columns
of its own beyond these, such as at_peak_gradient_bytes: names that end in _bytes are whole numbers of bytes.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Aggregate = Literal["", "maximum", "median", "sum"]  # over ranks or repeats; "" where it is the same for all
Group = Literal[
    "run", "model", "layout", "batch", "options", "outcome", "training", "time", "throughput", "memory", "bytes"
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

COLUMNS = tuple(
    Column(name, _TYPES[facts.pop("type")], **facts)
    for name, facts in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
)
COLUMN_NAMES = tuple(column.name for column in COLUMNS)
COLUMN_TYPES = {column.name: column.type for column in COLUMNS}
_BY_NAME = {column.name: column for column in COLUMNS}


def column(name: str) -> Column:
    """Return a column of the registry. Raise KeyError if it has none of this name."""
    return _BY_NAME[name]


@functools.cache
def column_type(name: str) -> type | None:
    """Return the type of a column's values; None for an unregistered column that is not in bytes: it can have any."""
    return int if name.endswith("_bytes") else COLUMN_TYPES.get(name)


def columns_aggregated_by(aggregate: Aggregate) -> tuple[str, ...]:
    """Return the names of the columns that are aggregated in this way."""
    return tuple(entry.name for entry in COLUMNS if entry.aggregate == aggregate)
