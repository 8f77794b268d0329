"""The comparison as a table for a paper: LaTeX with booktabs, and the same cells as CSV."""

import csv
import io
import statistics
from collections.abc import Sequence
from typing import Literal

from harness.report.charts.setting import setting
from harness.report.frame import baseline_name, column_values
from harness.report.ranking import Standing
from harness.report.speeds import timed_runs
from harness.report.text import ONE, byte_unit, format_numbers, format_ratios
from harness.report.view import View

Statistic = Literal["median", "mean"]  # median [min, max], or mean ± sd

_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
    "×": "$\\times$",
    "±": "$\\pm$",
    "·": "$\\cdot$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
}


def latex_table(view: View, statistic: Statistic = "median") -> str:
    """Return the comparison as a LaTeX table in the style of booktabs, whose caption has the setting."""
    header, rows = paper_table(view, statistic)
    words = {"median": "medians [minimum, maximum]", "mean": "means ± standard deviations"}
    caption = (
        f"Tokens per second are {words[statistic]} of n undisturbed runs; a speed of fewer than three runs has no"
        f" spread and ranks nothing, and disturbed ones are left out. Setting: {setting(view)}."
    )
    cells = [" & ".join(map(escape, row)) + r" \\" for row in rows]
    return "\n".join(
        (
            r"% Needs \usepackage{booktabs}.",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape(caption)}}}",
            rf"\label{{tab:{''.join(c if c.isalnum() else '-' for c in view.name)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(map(escape, header)) + r" \\",
            r"\midrule",
            *cells,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        )
    )


def csv_table(view: View, statistic: Statistic = "median") -> str:
    """Return the comparison as CSV."""
    sink = io.StringIO()
    header, rows = paper_table(view, statistic)
    csv.writer(sink, lineterminator="\n").writerows([header, *rows])
    return sink.getvalue()


def paper_table(view: View, statistic: Statistic) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: each configuration with its ranks, speed, number of runs, memory and communication.

    A disturbed speed is left out, and one of fewer than three runs has no spread.
    """
    table, standings = view.line_medians, view.ranking.standings
    peaks, sent = (column_values(table, name) for name in ("peak_allocated_bytes", "communication_bytes"))
    memory, communication = byte_unit(peaks), byte_unit(sent)
    compared = baseline_name(table)
    columns = {
        "configuration": [str(label) for label in column_values(table, "label")],
        "ranks": ["" if count is None else str(count) for count in column_values(table, "world_size")],
        "tokens/s": _speeds(view, statistic),
        "n": [_count(standing) for standing in standings],
        "× tokens/s": format_ratios(column_values(table, "tokens_per_second_ratio")),
        f"peak ({memory.name})": format_numbers(peaks, memory),
        "× peak": format_ratios(column_values(table, "peak_allocated_bytes_ratio")),
        f"sent per step ({communication.name})": format_numbers(sent, communication),
        "status": _statuses(view),
    }
    columns = {name: cells for name, cells in columns.items() if any(cells) and (compared or not name.startswith("×"))}
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def escape(text: str) -> str:
    """Return text that LaTeX typesets as it is."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _count(standing: Standing) -> str:
    return str(standing.speed.runs) if standing.speed and not standing.speed.is_disturbed else ""


def _statuses(view: View) -> list[str]:
    """Return the statuses, if not all runs ended ok."""
    statuses = [str(line.status) for line in view.lines]
    return statuses if any(status != "ok" for status in statuses) else [""] * len(statuses)


def _speeds(view: View, statistic: Statistic) -> list[str]:
    """Return the speeds of all lines, in one form."""
    figures: list[tuple[float | None, Sequence[float]]] = []
    for line, standing in zip(view.lines, view.ranking.standings, strict=True):
        speed = standing.speed
        if speed is None or speed.is_disturbed:
            figures.append((None, ()))
        elif statistic == "mean":
            runs = [run.row["tokens_per_second"] for run in timed_runs(line.runs) if run.row.get("tokens_per_second")]
            figures.append((statistics.mean(runs), (statistics.stdev(runs),) if speed.is_ranked else ()))
        else:
            figures.append((speed.median, (speed.low, speed.high) if speed.is_ranked else ()))
    middles = format_numbers([value for value, _ in figures], ONE)
    return [
        middle + _spread(format_numbers([*spread, value], ONE)[: len(spread)])
        for middle, (value, spread) in zip(middles, figures, strict=True)
    ]


def _spread(texts: Sequence[str]) -> str:
    """Return the ends of a range in brackets, or one deviation behind its sign."""
    if len(texts) == 2:
        return f" [{texts[0]}, {texts[1]}]"
    return f" ± {texts[0]}" if texts else ""
