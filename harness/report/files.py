"""The files of a comparison that are derived from its records."""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.records.columns import column_type
from harness.records.run_folder import ComparisonFolder
from harness.records.runs_csv import columns_of, rows_of, write_runs_csv
from harness.records.schema import Row
from harness.report import html, markdown
from harness.report.charts import render, style
from harness.report.charts.setting import setting
from harness.report.derivations import derive_line, pack
from harness.report.document import Chart, Section, Table, charts
from harness.report.explorer import build_explorer
from harness.report.latex import Statistic, csv_table, escape, latex_table
from harness.report.sections import sections
from harness.report.view import MOST, View, truncate
from harness.util.errors import UserError
from harness.util.files import atomic_write_bytes, atomic_write_text
from harness.util.text import sanitize


@dataclass(frozen=True)
class Exported:
    """What to export, and in which form."""

    formats: tuple[str, ...]  # of FORMATS
    width: float | None = None  # of pictures in millimetres; by default they are as wide as in the report
    statistic: Statistic = "median"  # how speeds are summarized


def write_files(
    results_dir: Path,
    view: View,
    pivot: str | None = None,
    fits_in: int | None = None,
    exported: Exported | None = None,
) -> list[Path]:
    """Write runs.csv, runs.parquet, report.md with its charts and report.html, and return their paths.

    Args:
        results_dir: The folder to write to.
        view: The runs to report.
        pivot: A column of runs.csv to tabulate strategies against.
        fits_in: The memory in bytes that a recommendation has to fit in.
        exported: What to export beside the report, if anything.
    """
    rows = rows_of(view.records)
    written = [write_runs_csv(results_dir, rows), write_runs_parquet(results_dir, rows)]
    report = sections(view, pivot, fits_in)
    drawn = render.drawn(charts(report), "report.md has no charts")
    html_page = _html(view, report, drawn)
    _write_figures(results_dir / markdown.FIGURES, drawn)
    pages = {"report.md": markdown.page(view.name, report, drawn), "report.html": html_page}
    for name, text in pages.items():
        if text is not None:
            atomic_write_text(results_dir / name, text)
            written.append(results_dir / name)
    return written + (export(results_dir, view, list(charts(report)), exported) if exported else [])


def _html(view: View, report: Sequence[Section], drawn: Mapping[str, str]) -> str | None:
    try:
        library, config = render.library(), (style.config(), style.config(dark=True))
    except render.DrawingError as error:
        print(f"report.html is not written: {sanitize(error)}", file=sys.stderr)
        return None
    part = truncate(view, MOST)
    explorer, derivations = build_explorer(part), _derivations(part, report)
    return html.page(view.name, report, explorer, library, config, drawn, latex_table(part), derivations)


def _derivations(view: View, report: Sequence[Section]) -> dict[str, Any]:
    """Return how the figures were worked out of those columns that some table of the report has."""
    tables = [part for section in report for part in section.parts if isinstance(part, Table)]
    keys = {key for table in tables for key in table.keys if key}
    return pack(
        [{name: entry for name, entry in derive_line(line.record).items() if name in keys} for line in view.lines]
    )


def _write_figures(folder: Path, drawn: dict[str, str]) -> None:
    """Write the charts of this report and remove all others; the folder belongs to the report."""
    if not drawn:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.svg"):
        if path.stem not in drawn:
            path.unlink(missing_ok=True)
    for name, text in drawn.items():
        atomic_write_text(folder / f"{name}.svg", text)


_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


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
    dtype = column_type(name)
    if dtype is None:
        types = {type(value) for value in values if value is not None}
        dtype = types.pop() if len(types) == 1 else float if types == {int, float} else str
    if dtype is float:
        values = [None if value is None else float(value) for value in values]
    if dtype is str:
        texts = {text: sanitize(text) for text in {str(value) for value in values if value is not None}}
        values = [None if value is None else texts[str(value)] for value in values]
    return pa.array(values, type=_TYPES[dtype])


PICTURES = ("svg", "png", "pdf")

FORMATS = ("csv", *PICTURES, "latex")

FOLDER = "export"  # beside the report

_MILLIMETRES = {"mm": 1.0, "cm": 10.0, "in": 25.4, "pt": 25.4 / 72}


def parse_formats(text: str) -> tuple[str, ...]:
    """Return the formats of a list such as csv,pdf,latex. Raises UserError for any other format."""
    formats = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
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


def export(folder: Path, view: View, shown: Sequence[Chart], exported: Exported) -> list[Path]:
    """Write the comparison and the charts into a folder of their own beside the report, and return the paths.

    Args:
        folder: The folder of the report.
        view: The runs to compare.
        shown: The charts of the report.
        exported: What to write.
    """
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in _exported(view, shown, exported):
        is_text = isinstance(content, str)
        atomic_write_bytes(target / name, content.encode("utf-8", "backslashreplace") if is_text else content)
        written.append(target / name)
    return written


def _exported(view: View, shown: Sequence[Chart], exported: Exported) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each file to export."""
    if "csv" in exported.formats:
        yield "table.csv", csv_table(view, exported.statistic)
    if "latex" in exported.formats:
        yield "table.tex", latex_table(view, exported.statistic)
    for form in (form for form in PICTURES if form in exported.formats):
        try:
            pictures = render.pictures({chart.name: chart.spec for chart in shown}, form, exported.width)
        except render.DrawingError as error:
            raise UserError(f"--export={form}: {error}") from None
        yield from ((f"{name}.{form}", content) for name, content in pictures.items())
    if {"latex", "pdf"} <= {*exported.formats}:
        yield "figures.tex", _figures(view, shown)


def _figures(view: View, shown: Sequence[Chart]) -> str:
    """Return the charts as LaTeX figures, whose captions have the setting."""
    figures = [r"% Needs \usepackage{graphicx}."]
    for chart in shown:
        figures += [
            r"\begin{figure}",
            r"\centering",
            rf"\includegraphics{{{chart.name}.pdf}}",
            rf"\caption{{{escape(f'{chart.title}. {chart.alt_text} Setting: {setting(view)}.')}}}",
            rf"\label{{fig:{chart.name}}}",
            r"\end{figure}",
        ]
    return "\n".join(figures) + "\n"
