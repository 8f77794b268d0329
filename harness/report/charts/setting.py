"""The setting of a report's runs in one line, which every picture shows: the model, the ranks and the device."""

import textwrap
from collections.abc import Iterable

from harness.records.schema import Record
from harness.report.labels import value_text
from harness.report.view import View
from harness.util.text import count_text, join_words, sanitize

_MOST_VALUES = 3  # of one part that are listed

LINE = 98  # characters of one line under a chart's title


def setting(view: View) -> str:
    """Return what was trained, in which precision, on how many ranks of which device, and when."""
    rows = [record.row for record in view.lines]
    ranks = sorted({row["world_size"] for row in rows if row.get("world_size")})
    days = sorted({str(run.row["started_at"])[:10] for run in view.records if run.row.get("started_at")})
    parts = [
        _some((model_name(line.record) for line in view.lines), "models"),
        _some((row.get("precision") for row in rows), "precisions"),
        f"{join_words([str(count) for count in ranks])} rank{'s' * (ranks != [1])}" if ranks else "",
        _some((_device(line.record) for line in view.lines), "devices"),
        " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    ]
    return sanitize(" · ".join(part for part in parts if part))


def setting_lines(view: View, width: int = LINE) -> list[str]:
    """Return the setting in lines of at most so many characters."""
    return textwrap.wrap(setting(view), width, break_long_words=True)


def model_name(record: Record) -> str:
    """Return the name of the model that a run trained, with its size."""
    name, parameters = record.row.get("model"), record.row.get("parameters")
    size = f" ({value_text('parameters', parameters)})" if parameters else ""
    return f"{name}{size}" if name else ""


def _device(record: Record) -> str:
    """Return the name of the device that a run was measured on, and for a CPU its cores."""
    environment, measured_on = record.environment, record.row.get("measured_on")
    if measured_on != "cpu":
        return str(environment.get("device_name") or measured_on or "")
    cores, processor = environment.get("cores"), environment.get("processor")
    return "CPU" + (f" {processor}" if processor else "") + (f", {count_text(cores, 'core')}" if cores else "")


def _some(values: Iterable[object], noun: str) -> str:
    """Return the distinct values, or their number where they are many."""
    known = list(dict.fromkeys(str(value) for value in values if value))
    return join_words(known) if 0 < len(known) <= _MOST_VALUES else f"{len(known)} {noun}" if known else ""
