"""The files of a comparison that are derived from its records: tables, pages, and what a paper needs."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Row, column_type
from harness.records.store import columns_of, rows_of, write_runs_csv
from harness.report import html, markdown
from harness.report.charts import render
from harness.report.derivations import derive_line, pack
from harness.report.document import Chart, Section, Table
from harness.report.overview import build_explorer
from harness.report.paper import Statistic, latex_figures, latex_table, paper_csv
from harness.report.view import MOST, View, truncate
from harness.util.files import atomic_write_bytes, atomic_write_text
from harness.util.text import UserError, sanitize


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
        width: The width of pictures and of the LaTeX table in millimetres. Pictures then have no title: a caption has
            it. By default they are as wide as in the report, and the table has all columns.
        statistic: How speeds are summarized.
    """
    contents: dict[str, Any] = {}
    if "csv" in formats:
        contents["table.csv"] = paper_csv(view, statistic)
    if "latex" in formats:
        contents["table.tex"] = latex_table(view, statistic, width)
    for form in (form for form in PICTURES if form in formats):
        try:
            pictures = render.pictures({chart.name: chart.spec for chart in shown}, form, width)
        except render.DrawingError as error:
            raise UserError(f"--export={form}: {error}") from None
        contents |= {f"{name}.{form}": content for name, content in pictures.items()}
    if {"latex", "pdf"} <= {*formats}:
        contents["figures.tex"] = latex_figures(view, shown, width)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        is_text = isinstance(content, str)
        atomic_write_bytes(folder / name, content.encode("utf-8", "backslashreplace") if is_text else content)
    return [folder / name for name in contents]
