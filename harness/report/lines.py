"""The lines of a report: a run, or all repeats of a configuration, with its label and its figures beside others'."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.records.provenance import version_differences
from harness.records.schema import Record, Row
from harness.report.comparability import EQUAL_BYTES, comparability_key, group_by, program_key, varying_columns
from harness.report.labels import (
    OTHER_OPTIONS,
    labels,
    non_default,
    other_differences,
)
from harness.report.speeds import CROWDED, Speed, are_alike, speed_of, timed_runs
from harness.report.text import bytes_text
from harness.util.text import sanitize

STATE_COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")

MEMORY_COLUMNS = (*STATE_COLUMNS, "activation_bytes", "peak_allocated_bytes")

RATIO_COLUMNS = ("peak_allocated_bytes", "tokens_per_second", "communication_bytes")

Datum = dict[str, Any]  # the data of one mark of a chart; always has `strategy`


@dataclass(frozen=True, eq=False)
class Item:
    """What a row of a chart stands for, such as a line of the report."""

    label: str
    strategy: str  # by which the page hides the item
    position: int  # from the top

    @property
    def drawn_speed(self) -> float | None:
        """The tokens per second, None where they are not known or not to be drawn."""
        return None

    @property
    def is_simulated(self) -> bool:
        """Whether its figures were simulated."""
        return False

    def datum(self, **values: Any) -> Datum:
        """Return the data of one of the item's marks."""
        own = {"strategy": self.strategy, "label": self.label, "position": self.position}
        return own | ({"simulated": True} if self.is_simulated else {}) | values


@dataclass(frozen=True, eq=False)
class Line(Item):
    """A line of a report. Its label is unique among the lines that it was made with.

    Besides the columns of the record's row, `get` knows:

    - `state_bytes`: parameters, gradients and optimizer state together;
    - `stale_reason`: what differs between the record's versions and the installed ones;
    - `other options`: the differing configuration keys of lines that no column distinguishes;
    - `baseline`: the label of the one line that all ratios refer to, for the lines that are comparable with it;
    - `<column>_ratio`: its value over the baseline's; of speed only where both may be ranked;
    - `speed_low`, `speed_high`: the slowest and the fastest run of a speed that may be ranked;
    - `is_crowded`: whether its ranks shared processor cores, so that its speed is not ranked;
    - `is_ignored`: whether its speed and times are disturbed or barely timed;
    - `unsettled`: whether its speed differs from the baseline's by no more than runs vary.
    """

    record: Record  # as merged, if it stands for repeats
    speed: Speed  # over the repeats; NO_SPEED where none is known
    program: str  # equal for lines that run the same program, such as `tp` and `single` on one rank
    values: Row
    group: int | None = None  # the position of its group in `View.groups`; None where no run ended ok
    is_on_front: bool = False  # of its group

    def get(self, name: str) -> Any:
        """Return the value of a column, None where it is unknown."""
        return self.values.get(name)

    def number(self, name: str) -> float | None:
        """Return a column's value if it can be drawn."""
        return finite_number(self.values.get(name))

    def ratio(self, name: str, other: "Line") -> float | None:
        """Return a column's value over that of another line, None where it is unknown."""
        value, base = self.number(name), other.number(name)
        return value / base if base and value is not None else None

    def times_as_fast(self, other: "Line") -> float | None:
        """Return the speed over that of another line, 1 where the difference is not certain.

        It is None where one of them is not ranked or both run the same program.
        """
        if not (self.speed.is_ranked and other.speed.is_ranked) or self.program == other.program:
            return None
        return 1.0 if are_alike(self.speed, other.speed) else self.speed.median / other.speed.median

    @property
    def checkpoints(self) -> bool:
        """Whether activations are computed again."""
        return self.row.get("checkpointing") not in (None, "none")

    @property
    def row(self) -> Row:
        """The row of the record."""
        return self.record.row

    @property
    def runs(self) -> Sequence[Record]:
        """The records that the line stands for."""
        return self.record.runs or [self.record]

    @cached_property
    def timed(self) -> list[Record]:
        """The runs that speed and times are taken from."""
        return timed_runs(self.runs)

    @cached_property
    def median_run(self) -> Record:
        """The run with the median speed, among the undisturbed ones: the parts of a step add up within a run only."""
        runs = self.timed or [run for run in self.runs if run.status == self.status]
        return sorted(runs, key=lambda run: run.row.get("tokens_per_second") or 0.0)[(len(runs) - 1) // 2]

    @cached_property
    def peak_run(self) -> Record:
        """The run with the largest peak."""
        runs = [run for run in self.runs if run.status == self.status]
        return max(runs, key=lambda run: run.row.get("peak_allocated_bytes") or 0)

    @property
    def status(self) -> str:
        """The status of the line's runs."""
        return self.record.status

    @property
    def ok(self) -> bool:
        """Whether the line has figures."""
        return self.status == "ok"

    @property
    def is_simulated(self) -> bool:
        """Whether the code of its ranks ran on simulated devices."""
        return bool(self.row.get("launch") == "simulated")

    @property
    def untimed(self) -> str:
        """Why the times of a line that is ok are not drawn; empty where they are."""
        reasons = ("disturbed" * self.speed.is_disturbed, CROWDED * self.speed.is_crowded)
        return next(filter(None, reasons), "") if self.ok else ""

    @property
    def is_timed(self) -> bool:
        """Whether charts of time have the line: it is ok, nothing disturbed it, and every rank had a core."""
        return self.ok and not self.untimed

    @property
    def state(self) -> str:
        """The status, or why the times are not drawn."""
        return f"{self.untimed}: not comparable" if self.untimed else self.status

    @property
    def drawn_speed(self) -> float | None:
        """The median of the tokens per second, None where it is not known or not to be drawn."""
        return finite_number(self.speed.median) if self.is_timed else None

    @property
    def peak(self) -> Any:
        """The peak memory of the rank with the largest one, in bytes, None where the line is not ok."""
        return self.number("peak_allocated_bytes") if self.ok else None

    @property
    def end(self) -> str:
        """The status of a line that is not ok, with the memory that it last reported."""
        allocated = self.number("last_seen_allocated_bytes")
        return self.status + (f", last reported {bytes_text(allocated)}" if allocated else "")


def finite_number(value: Any) -> float | None:
    """Return a finite number, None for anything else: a record may hold 1e999, which is read as infinity."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def lines_of(records: Sequence[Record]) -> list[Line]:
    """Return a line for each record, in their order."""
    names, others = labels_of(records)
    lines: list[Line] = []
    for position, (record, label, other) in enumerate(zip(records, names, others, strict=True)):
        row, speed = record.row, speed_of(record.runs or [record])
        state: list[Any] = [row.get(name) for name in STATE_COLUMNS]
        values = row | {
            "label": label,
            OTHER_OPTIONS: other,
            "stale_reason": "; ".join(version_differences(record)) or None,
            "state_bytes": None if None in state else sum(state),
            "is_crowded": speed.is_crowded,
            "is_ignored": speed.is_disturbed,
            "speed_low": speed.low if speed.is_ranked else None,
            "speed_high": speed.high if speed.is_ranked else None,
        }
        strategy, program = sanitize(row.get("strategy") or ""), program_key(record) or label
        lines.append(Line(label, strategy, position, record, speed, program, values))
    compared = compared_lines(lines)
    for line in compared:
        line.values.update(_beside(line, compared[0]))
    return lines


def labels_of(records: Sequence[Record]) -> tuple[list[str], list[str | None]]:
    """Return a unique label for each record, and the differing keys of those that no column distinguishes."""
    rows = [record.row for record in records]
    varying = varying_columns(rows)
    others = other_differences(records, varying)
    return labels([row | {OTHER_OPTIONS: other} for row, other in zip(rows, others, strict=True)], varying), others


def _beside(line: Line, base: Line) -> Row:
    """Return the ratios of a line to the baseline's, and whether a difference of their speeds is uncertain."""
    is_ranked = line.speed.is_ranked and base.speed.is_ranked
    names = {*MEMORY_COLUMNS, *RATIO_COLUMNS} - (set() if is_ranked else {"tokens_per_second"})
    unsettled = is_ranked and line is not base and are_alike(line.speed, base.speed)
    return {"baseline": base.label, "unsettled": unsettled} | {
        f"{name}_ratio": line.ratio(name, base) for name in names
    }


def compared_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that ratios of a table are of, of which the first is the one that all refer to.

    They are the largest set of comparable lines, and there are none if that is fewer than half of those that ended ok.
    The first is `ddp`, or where `ddp` ran on several numbers of ranks `single`, else `ddp` on the fewest, else any;
    among several the one without checkpointing, on the fewest ranks and with the fewest other options.
    """
    ok = [line for line in lines if line.ok]
    settings = group_by(ok, lambda line: comparability_key(line.row))
    largest = max(settings.values(), key=len, default=[])
    if len(largest) < 2 or 2 * len(largest) < len(ok):
        return []
    of_strategy = group_by(largest, lambda line: line.get("strategy"))
    ddp, single = of_strategy.get("ddp", []), of_strategy.get("single", [])
    has_one_size = len({line.get("world_size") for line in ddp}) == 1
    first = ddp if has_one_size else single or ddp

    def rank(line: Line) -> tuple[bool, bool, int, int]:
        return line not in first, line.checkpoints, line.get("world_size") or 0, len(non_default(line.row))

    return sorted(largest, key=rank)


def column_values(lines: Iterable[Line], name: str) -> list[Any]:
    """Return a column's value of each line, None where it is unknown."""
    return [line.values.get(name) for line in lines]


def distinct_values(lines: Iterable[Line], name: str) -> list[Any]:
    """Return the different known values of a column, in the order of their first lines."""
    return list(dict.fromkeys(value for line in lines if (value := line.values.get(name)) is not None))


def shared_value(lines: Iterable[Line], name: str) -> Any:
    """Return the value of a column that all lines have, None where they differ."""
    values = {line.values.get(name) for line in lines}
    return values.pop() if len(values) == 1 else None


def least(lines: Iterable[Line], name: str) -> list[Line]:
    """Return the lines with the smallest known value of a column; sizes that hardly differ are equal."""
    known = [line for line in lines if line.values.get(name) is not None]
    limit = (1 + EQUAL_BYTES) * min(column_values(known, name), default=0)
    return [line for line in known if line.values[name] <= limit]


def rows_of(lines: Iterable[Line]) -> list[Row]:
    """Return what is known of each line."""
    return [line.values for line in lines]


def baseline_name(lines: Iterable[Line]) -> str:
    """Return the label of the line that all ratios refer to; empty where no other line is compared with it."""
    return next((base for line in lines if (base := line.get("baseline")) not in (None, line.label)), "")


def labels_by(lines: Iterable[Line], value_of: Callable[[Line], str | None]) -> dict[str, list[str]]:
    """Return the labels of lines by a text, without the lines where it is empty or unknown."""
    groups = group_by(lines, value_of)
    return {value: [line.label for line in members] for value, members in groups.items() if value}


def labels_by_kernel(lines: Iterable[Line]) -> dict[str, list[str]]:
    """Return the labels of lines by their attention kernel; empty if all have one, as lines should."""
    groups = labels_by(lines, lambda line: line.get("attention_kernel"))
    return groups if len(groups) > 1 else {}


def compared_layers(record: Record) -> str:
    """Return how many of its layers a run was compared on with a single process, such as 2 of 4; '' where on all."""
    layers, all_layers = record.row.get("reference_layers"), (record.config.get("model") or {}).get("num_hidden_layers")
    return f"{layers} of {all_layers}" if layers and all_layers and layers < all_layers else ""
