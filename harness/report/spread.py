"""How sure a figure is: repeated runs as one line, how far they lie apart, and which ratios that leaves unsettled."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.records.provenance import version_differences, versions
from harness.records.schema import Record, Row
from harness.report.labels import VARYING

# For the page: what the comparison's marks mean.
HOW_TO_READ = (
    "Runs that differ in nothing but their repeat are one line: the median of speed and time over those that ended ok,"
    " the maximum of memory and deviations; ± is half the range of their tokens per second over the median. A ratio of"
    " tokens per second with a trailing ~ does not settle which is faster: the two lines' spreads meet; an unknown"
    " one marks nothing. The spread of a line is ± where two of its runs or more ended ok, else half the interquartile"
    " range of the run's step times over their median, which says nothing of how runs differ: for that, repeat them"
    " (repeats=3)."
)

# Of a row: what is known before anything runs. Rows without a configuration are told apart by this alone.
_SETTLED = ("strategy", "checkpointing", "parameters", *(name for name in VARYING if name != "repeat"))

_MEDIAN = (
    *("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "bubble", "mfu", "hfu"),
    *("model_flops_per_second_per_device", "cpu_seconds", "joules_per_token"),
)

_MAXIMUM = ("loss_deviation", "grad_deviation", "in_flight")


def merge_repeats(records: Sequence[Record]) -> list[Record]:
    """The lines of a comparison, in the order of their first runs: what differs in `repeat` only is one.

    A line is a record with the row that its runs make together, and `runs`, the records it stands for. The row gains
    `runs`, `runs_alike` (how many of them ended as its status says) and `between_runs` (their relative spread).
    """
    now = versions()
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_repeat_key(record, now), []).append(record)
    lines: list[Record] = []
    for runs in groups.values():
        # The same repeat twice: what differs between them (the text they trained on, say) stands in no record.
        apart = len({_repeat(run) for run in runs}) < len(runs)
        lines += [_line([run]) for run in runs] if apart else [_line(runs)]
    return lines


def _repeat_key(record: Record, now: dict[str, str | None]) -> str:
    """Equal for records that may differ in their repeat and in nothing else, the code that made them included."""
    config = {key: value for key, value in result_affecting_keys(record.get("config") or {}).items() if key != "repeat"}
    settled = [record["row"].get(name) for name in _SETTLED]
    environment = record.get("environment") or {}
    host = [environment.get(key) for key in ("device_name", "cores")]
    return json.dumps([config, settled, host, version_differences(record, now)], sort_keys=True, default=str)


def _repeat(record: Record) -> Any:
    """Of a row that was refused for its very values the configuration alone knows."""
    repeat = record["row"].get("repeat")
    return (record.get("config") or {}).get("repeat") if repeat is None else repeat


def _line(runs: Sequence[Record]) -> Record:
    """`ok` if any run is, else as most of them ended; figures are of the runs that ended so."""
    ends = [run["row"]["status"] for run in runs]
    status = "ok" if "ok" in ends else max(ends, key=ends.count)
    rows: list[Row] = [run["row"] for run in runs if run["row"]["status"] == status]
    together = dict(rows[0]) if len(rows) == 1 else _all_together(rows)
    together |= {"run_id": rows[0]["run_id"], "runs": len(runs), "runs_alike": len(rows)}
    together["between_runs"] = relative_range([row.get("tokens_per_second") for row in rows])
    disturbed = dict.fromkeys(str(run["row"]["disturbed"]) for run in runs if run["row"].get("disturbed"))
    together["disturbed"] = "; ".join(disturbed) or None
    return runs[0] | {"row": together, "runs": list(runs)}


def _all_together(rows: Sequence[Row]) -> Row:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _together(name, [row.get(name) for row in rows]) for name in names}


def _together(name: str, column: Sequence[Any]) -> Any:
    """One value for a column of several runs; None where they differ and no rule says what stands for all.

    The parts of a peak or of a step add up in one run and would not as medians or maxima.
    """
    if all(value == column[0] for value in column):
        return column[0]
    known = [value for value in column if value is not None]
    if name in _MEDIAN:
        return statistics.median(known)
    if name in _MAXIMUM or (name.endswith("_bytes") and not name.startswith("at_peak_")):
        return max(known)
    return None


def relative_range(numbers: Sequence[float | None]) -> float | None:
    """Half the range over the median; None below two known values."""
    known = [number for number in numbers if number]
    return (max(known) - min(known)) / 2 / statistics.median(known) if len(known) > 1 else None


def spread(row: Row) -> float | None:
    """How far to either side of a speed, relative: half the range of its runs, else of the middle half of its steps."""
    between, steps = row.get("between_runs"), row.get("step_seconds_spread")
    return between if between is not None or steps is None else steps / 2


def is_unsettled(ratio: float | None, own: float | None, baseline: float | None) -> bool:
    """Whether the spreads of both sides, taken around their speeds, meet; an unknown one is taken for none.

    ratio: to the baseline's speed; False where there is none. own, baseline: relative, to either side.
    """
    if ratio is None:
        return False
    return abs(ratio - 1) < (own or 0.0) * ratio + (baseline or 0.0)
