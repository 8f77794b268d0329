"""What one can take along into a paper: the comparison as CSV and LaTeX, and the charts as SVG, PNG and PDF."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.report.charts import render
from harness.report.charts.setting import setting
from harness.report.document import Chart, VegaLite
from harness.report.latex import Statistic, csv_table, escape, latex_table
from harness.report.view import View
from harness.util.errors import UserError
from harness.util.files import atomic_write_bytes, atomic_write_text

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


@dataclass(frozen=True)
class Exported:
    """What to export, and in which form."""

    formats: tuple[str, ...]  # of FORMATS
    width: float | None = None  # of pictures in millimetres; by default they are as wide as in the report
    statistic: Statistic = "median"  # how speeds are summarized


def export(folder: Path, view: View, charts: Sequence[Chart], exported: Exported) -> list[Path]:
    """Write the comparison and the charts into a folder of their own beside the report, and return the paths.

    Args:
        folder: The folder of the report.
        view: The runs to compare.
        charts: The charts of the report.
        exported: What to write.
    """
    formats = exported.formats
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for form, name, text in (("csv", "table.csv", csv_table), ("latex", "table.tex", latex_table)):
        if form in formats:
            atomic_write_text(target / name, text(view, exported.statistic))
            written.append(target / name)
    specs = {chart.name: chart.spec for chart in charts}
    for form in (form for form in PICTURES if form in formats):
        for name, content in _pictures(specs, form, exported.width).items():
            atomic_write_bytes(target / f"{name}.{form}", content)
            written.append(target / f"{name}.{form}")
    if "latex" in formats and "pdf" in formats:
        atomic_write_text(target / "figures.tex", _figures(view, charts))
        written.append(target / "figures.tex")
    return written


def _pictures(specs: Mapping[str, VegaLite], form: str, width: float | None) -> dict[str, bytes]:
    try:
        return render.pictures(specs, form, width)
    except render.DrawingError as error:
        raise UserError(f"--export={form}: {error}") from None


def _figures(view: View, charts: Sequence[Chart]) -> str:
    """Return the charts as LaTeX figures, whose captions have the setting."""
    figures = [r"% Needs \usepackage{graphicx}."]
    for chart in charts:
        figures += [
            r"\begin{figure}",
            r"\centering",
            rf"\includegraphics{{{chart.name}.pdf}}",
            rf"\caption{{{escape(f'{chart.title}. {chart.alt_text} Setting: {setting(view)}.')}}}",
            rf"\label{{fig:{chart.name}}}",
            r"\end{figure}",
        ]
    return "\n".join(figures) + "\n"
