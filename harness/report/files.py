"""The files of a comparison that are derived from its records: tables, pages, and what a paper needs.

That is a LaTeX table with booktabs, the same cells as CSV, and pictures.
"""

import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import Markup

from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Row, column_type
from harness.records.store import columns_of, csv_cell, rows_of, write_runs_csv
from harness.report import html, markdown
from harness.report.charts import render
from harness.report.columns import ShownColumn, from_lines, write
from harness.report.derivations import derive_line, pack
from harness.report.document import Chart, Section, Table, template
from harness.report.lines import baseline_name
from harness.report.overview import build_explorer
from harness.report.text import ONE, format_numbers, sentence
from harness.report.view import MOST, View, setting, truncate
from harness.util.files import atomic_write_bytes, atomic_write_text
from harness.util.text import UserError, sanitize

Statistic = Literal["median", "mean"]  # median [min, max], or mean ± sd


def write_files(results_dir: Path, view: View, report: Sequence[Section]) -> list[Path]:
    """Write runs.csv, runs.parquet, report.md with its charts and report.html, and return their paths."""
    rows, page, figures = rows_of(view.records), results_dir / "report.md", results_dir / markdown.FIGURES
    written = [write_runs_csv(results_dir, rows), write_runs_parquet(results_dir, rows), page]
    drawn = markdown.write(page, view.name, report, "report.md has no charts")
    for former in {*figures.glob("*.svg")} - {figures / f"{name}.svg" for name in drawn}:
        former.unlink(missing_ok=True)
    if not drawn:
        shutil.rmtree(figures, ignore_errors=True)
    with render.failure_told("report.html is not written"):
        library, part = render.library(), truncate(view, MOST)
        data = {"latex": latex_table(part), "derivations": _derivations(part, report)}
        text = html.page(view.name, report, build_explorer(part), library, drawn, **data)
        atomic_write_text(results_dir / "report.html", text)
        written.append(results_dir / "report.html")
    return written


def _derivations(view: View, report: Sequence[Section]) -> dict[str, Any]:
    """Return how the figures were worked out of those columns that some table of the report has."""
    tables = [part for section in report for part in section.parts if isinstance(part, Table)]
    keys = {key for table in tables for key in table.keys if key}
    return pack(
        [{name: entry for name, entry in derive_line(line.record).items() if name in keys} for line in view.lines]
    )


_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}

# The types of columns without a declared one, by what pandas calls their values; all others become text.
_INFERRED = {"boolean": bool, "integer": int, "floating": float, "mixed-integer-float": float}


def write_runs_parquet(results_dir: Path, rows: Sequence[Row]) -> Path:
    """Write runs.parquet, with one row per run, and return its path.

    Unknown values are null. Text is on one line, as in runs.csv but without its quotes.
    """
    columns = {name: _column(name, values) for name, values in columns_of(rows).items()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    path = ComparisonFolder(results_dir).runs_parquet
    atomic_write_bytes(path, sink.getvalue().to_pybytes())
    return path


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    """Return a column with its declared type, else with the one type that its values share, else as text."""
    dtype = column_type(name) or _INFERRED.get(pd.api.types.infer_dtype(values), str)
    if dtype in (str, float):
        convert: Callable[[Any], str | float] = sanitize if dtype is str else float
        values = [None if value is None else convert(value) for value in values]
    return pa.array(values, type=_TYPES[dtype])


PICTURES = ("svg", "png", "pdf")

FORMATS = ("csv", *PICTURES, "latex")

FOLDER = "export"  # beside the report

_MILLIMETRES = {"mm": 1.0, "cm": 10.0, "in": 25.4, "pt": 25.4 / 72}


def parse_formats(text: str) -> tuple[str, ...]:
    """Return the formats of a list such as csv,pdf,latex. Raises UserError for any other format."""
    formats = tuple(part.strip() for part in text.split(",") if part.strip())
    if not formats or not {*formats} <= {*FORMATS}:
        raise UserError(f"--export={text}: choose from {', '.join(FORMATS)}")
    return formats


def parse_width(text: str) -> float:
    """Return the millimetres of a width such as 84mm or 3.25in. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip())
    millimetres = float(match[1]) * _MILLIMETRES.get(match[2], 0.0) if match else 0.0
    if not 40 <= millimetres <= 400:
        raise UserError(
            f"--width={text}: choose 40mm to 400mm, in {', '.join(_MILLIMETRES)}, such as 84mm for a column"
        )
    return millimetres


def export(
    folder: Path, view: View, shown: Sequence[Chart], formats: Sequence[str], width: float | None, statistic: Statistic
) -> list[Path]:
    """Write the comparison and the charts of its report into a folder of their own, and return the paths.

    Args:
        folder: The folder.
        view: The runs to compare.
        shown: The charts.
        formats: What to write, of FORMATS.
        width: The width of pictures in millimetres; by default they are as wide as in the report.
        statistic: How speeds are summarized.
    """
    contents: dict[str, Any] = {}
    if "csv" in formats:
        contents["table.csv"] = paper_table(view, statistic).map(csv_cell).to_csv(index=False, lineterminator="\n")
    if "latex" in formats:
        contents["table.tex"] = latex_table(view, statistic)
    for form in (form for form in PICTURES if form in formats):
        try:
            pictures = render.pictures({chart.name: chart.spec for chart in shown}, form, width)
        except render.DrawingError as error:
            raise UserError(f"--export={form}: {error}") from None
        contents |= {f"{name}.{form}": content for name, content in pictures.items()}
    if {"latex", "pdf"} <= {*formats}:
        contents["figures.tex"] = latex_figures(view, shown)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        is_text = isinstance(content, str)
        atomic_write_bytes(folder / name, content.encode("utf-8", "backslashreplace") if is_text else content)
    return [folder / name for name in contents]


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
