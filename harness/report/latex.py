"""The comparison as a table for a paper: LaTeX with booktabs, and the same cells as CSV."""

import statistics
from collections.abc import Sequence
from typing import Literal

import pandas as pd
from markupsafe import Markup

from harness.report.charts.setting import setting
from harness.report.columns import ShownColumn, from_lines, write
from harness.report.document import Chart
from harness.report.lines import baseline_name
from harness.report.templates import template
from harness.report.text import ONE, format_numbers, sentence
from harness.report.view import View

Statistic = Literal["median", "mean"]  # median [min, max], or mean ± sd

_SPECIAL: dict[int, str] = str.maketrans(
    {
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
)


def latex_table(view: View, statistic: Statistic = "median") -> str:
    """Return the comparison as a LaTeX table in the style of booktabs, whose caption has the setting."""
    table = paper_table(view, statistic).map(escape).rename(columns=escape)
    written = table.style.hide(axis="index").to_latex(
        column_format=f"l{'r' * (len(table.columns) - 1)}",
        position_float="centering",
        hrules=True,
        label=f"tab:{''.join(c if c.isalnum() else '-' for c in view.name)}",
        caption=escape(sentence("paper_caption", statistic=statistic, setting=setting(view))),
    )
    return f"% Needs \\usepackage{{booktabs}}.\n{written}"


def latex_figures(view: View, shown: Sequence[Chart]) -> str:
    """Return the charts as LaTeX figures, whose captions have the setting."""
    figures = template("figures.tex.j2", lambda text: Markup(escape(text)))
    return figures.render(charts=shown, setting=setting(view))


def csv_table(view: View, statistic: Statistic = "median") -> str:
    """Return the comparison as CSV."""
    return str(paper_table(view, statistic).to_csv(index=False, lineterminator="\n"))


def paper_table(view: View, statistic: Statistic) -> pd.DataFrame:
    """Return each configuration with its ranks, speed, number of runs, memory and communication.

    A disturbed speed is left out, and one of fewer than three runs has no spread.
    """
    lines = view.lines
    counts = [line.speed.runs or None if not line.speed.is_disturbed else None for line in lines]
    has_failures = any(line.status != "ok" for line in view.lines)
    columns = [
        from_lines(lines, "label", "configuration", "text"),
        from_lines(lines, "world_size", "ranks"),
        ShownColumn("tokens/s", _speeds(view, statistic)),
        ShownColumn("n", counts),
        from_lines(lines, "tokens_per_second_ratio", "× tokens/s", "ratio"),
        from_lines(lines, "peak_allocated_bytes", "peak ({unit})"),
        from_lines(lines, "peak_allocated_bytes_ratio", "× peak", "ratio"),
        from_lines(lines, "communication_bytes", "sent per step ({unit})", "sent"),
        ShownColumn("status", [line.status if has_failures else None for line in view.lines]),
    ]
    has_ratios = bool(baseline_name(lines))
    shown = [column for column in columns if column.is_known and (has_ratios or not column.header.startswith("×"))]
    return pd.DataFrame({column.header: column.cells for column in write(shown)})


def escape(text: str) -> str:
    """Return text that LaTeX typesets as it is."""
    return text.translate(_SPECIAL)


def _speeds(view: View, statistic: Statistic) -> list[str]:
    """Return the speeds of all lines, in one form."""
    figures: list[tuple[float | None, Sequence[float]]] = []
    for line in view.lines:
        speed = line.speed
        if not speed.runs or speed.is_disturbed:
            figures.append((None, ()))
        elif statistic == "mean":
            runs = [run.row["tokens_per_second"] for run in line.timed if run.row.get("tokens_per_second")]
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
