"""The files of a comparison that are derived from its records."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.runs_csv import rows_of, write_runs_csv
from harness.report import html, markdown
from harness.report.charts import render, style
from harness.report.derivation import pack
from harness.report.derivations import derive_line
from harness.report.document import Chart, Section, Table
from harness.report.explorer import build_explorer
from harness.report.exports import Exported, export
from harness.report.latex import latex_table
from harness.report.parquet import write_runs_parquet
from harness.report.sections import sections
from harness.report.view import MOST, View, truncate
from harness.util.files import atomic_write_text
from harness.util.text import sanitize


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
    drawn = _draw(report)
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
    return html.page(view.name, report, explorer, library, config, drawn, latex_table(view), derivations)


def _derivations(view: View, report: Sequence[Section]) -> dict[str, Any]:
    """Return how the figures were worked out of those columns that some table of the report has."""
    tables = [part for section in report for part in section.parts if isinstance(part, Table)]
    keys = {key for table in tables for key in table.keys if key}
    return pack([{name: entry for name, entry in derive_line(line).items() if name in keys} for line in view.lines])


def _draw(report: Sequence[Section]) -> dict[str, str]:
    """Return the charts as SVG by their names. If drawing fails, report.md has no charts and all else is written."""
    try:
        return render.svgs({chart.name: chart.spec for chart in charts(report)})
    except render.DrawingError as error:
        print(f"report.md has no charts: {sanitize(error)}", file=sys.stderr)
        return {}


def charts(sections: Iterable[Section]) -> Iterator[Chart]:
    """Yield the charts in the order in which they are read."""
    for section in sections:
        yield from (part for part in section.parts if isinstance(part, Chart))
        yield from charts(section.inner)


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
