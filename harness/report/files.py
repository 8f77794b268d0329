"""The files of a comparison, rebuilt from its records."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.records.runs_csv import rows_of, write_runs_csv
from harness.report import html, markdown
from harness.report.charts import render, style
from harness.report.document import Chart, Section
from harness.report.parquet import write_runs_parquet
from harness.report.sections import sections
from harness.report.view import MOST, View, truncate
from harness.util.files import atomic_write_text
from harness.util.text import sanitize


def write_files(results_dir: Path, view: View, pivot: str | None = None, fits_in: int | None = None) -> list[Path]:
    """Writes runs.csv, runs.parquet, report.md with its pictures and report.html, and returns their paths.

    pivot: a column to set strategies against. fits_in: bytes that a recommendation has to fit in.
    """
    rows = rows_of(view.records)
    written = [write_runs_csv(results_dir, rows), write_runs_parquet(results_dir, rows)]
    found = sections(view, pivot, fits_in)
    with ThreadPoolExecutor(max_workers=1) as aside:  # another process draws the pictures, which takes a second
        pictures_drawn = aside.submit(_drawn, found)
        html_page = _html(view, found)
        drawn = pictures_drawn.result()
    _write_figures(results_dir / markdown.FIGURES, drawn)
    pages = {"report.md": markdown.page(view.name, found, drawn), "report.html": html_page}
    for name, text in pages.items():
        if text is not None:
            atomic_write_text(results_dir / name, text)
            written.append(results_dir / name)
    return written


def _html(view: View, found: Sequence[Section]) -> str | None:
    try:
        library, config = render.library(), (style.config(), style.config(dark=True))
    except render.DrawingError as error:
        print(f"report.html is not written: {sanitize(error)}", file=sys.stderr)
        return None
    return html.page(view.name, found, html.build_explorer(truncate(view, MOST)), library, config)


def _drawn(found: Sequence[Section]) -> dict[str, str]:
    """The pictures by their names; what cannot be drawn costs report.md its pictures and nothing else."""
    try:
        return render.svgs({picture.name: picture.spec for picture in pictures(found)})
    except render.DrawingError as error:
        print(f"report.md is without pictures: {sanitize(error)}", file=sys.stderr)
        return {}


def pictures(sections: Iterable[Section]) -> Iterator[Chart]:
    """In the order in which they are read."""
    for section in sections:
        yield from (part for part in section.parts if isinstance(part, Chart))
        yield from pictures(section.inner)


def _write_figures(folder: Path, drawn: dict[str, str]) -> None:
    """The pictures of this report and no others; the folder is the report's own."""
    if not drawn:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.svg"):
        if path.stem not in drawn:
            path.unlink(missing_ok=True)
    for name, text in drawn.items():
        atomic_write_text(folder / f"{name}.svg", text)
