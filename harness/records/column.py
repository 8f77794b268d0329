"""A column of runs.csv: its type, unit, title, meaning and use, and short ways to describe one."""

from dataclasses import dataclass
from typing import Literal

Aggregate = Literal["", "maximum", "median", "sum"]  # over ranks or repeats; "" where it is the same for all

Better = Literal["", "higher", "lower"]

Group = Literal[
    "run", "model", "layout", "batch", "options", "outcome", "training", "time", "throughput", "memory", "bytes"
]

GROUP_TITLES: dict[Group, str] = {
    "run": "Run",
    "model": "Model",
    "layout": "Strategy and layout",
    "batch": "Batch",
    "options": "Options",
    "outcome": "Outcome of runs that did not end ok",
    "training": "Training",
    "time": "Time",
    "throughput": "Throughput",
    "memory": "Memory",
    "bytes": "Communication",
}


@dataclass(frozen=True)
class Column:
    """One column of runs.csv."""

    name: str
    type: type
    unit: str
    title: str
    aggregate: Aggregate
    better: Better
    group: Group
    help: str
    short_title: str = ""  # for labels and narrow tables; empty where the title is short enough

    @property
    def label(self) -> str:
        """The short title, or the title if there is none."""
        return self.short_title or self.title


def text_column(name: str, group: Group, title: str, help: str) -> Column:
    """Return a column of text."""
    return Column(name, str, "", title, "", "", group, help)


def count_column(
    name: str,
    group: Group,
    title: str,
    help: str,
    aggregate: Aggregate = "",
    better: Better = "",
    short_title: str = "",
) -> Column:
    """Return a column of whole numbers."""
    return Column(name, int, "", title, aggregate, better, group, help, short_title)


def bool_column(name: str, group: Group, title: str, help: str) -> Column:
    """Return a column of truth values."""
    return Column(name, bool, "", title, "", "", group, help)


def bytes_column(name: str, title: str, help: str, group: Group = "memory", better: Better = "lower") -> Column:
    """Return a column of bytes, of which a run has the largest of its ranks."""
    return Column(name, int, "bytes", title, "maximum", better, group, help)


def seconds_column(name: str, title: str, help: str, better: Better = "lower") -> Column:
    """Return a column of seconds, of which a configuration has the median of its repeats."""
    return Column(name, float, "seconds", title, "median", better, "time", help)


def float_column(
    name: str, group: Group, unit: str, title: str, help: str, aggregate: Aggregate = "", better: Better = ""
) -> Column:
    """Return a column of numbers in a unit."""
    return Column(name, float, unit, title, aggregate, better, group, help)
