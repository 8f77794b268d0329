"""The table and the figures of a paper: they fit a column, and their captions and notes say what is there."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records.store import read_runs_csv
from harness.report.document import charts
from harness.report.files import export
from harness.report.paper import latex_figures, latex_table, paper_csv
from harness.report.sections import sections
from harness.report.view import View
from tests.support import packages
from tests.support.example_records import records, row, thrice
from tests.support.pages import compared

ROOT = Path(__file__).resolve().parents[2]

COLUMN = 3.35 * 25.4  # millimetres of a column of a two-column paper

# The widths in points of the characters of Computer Modern at 8 points, as TeX's \fontcharwd prints them.
EXACT = {
    character: width
    for width, characters in (
        (2.36, "!',.:;[]`il"),
        (3.36, "()rstI-_jf "),
        (4.25, "0123456789ag*/"),
        (3.78, "cez"),
        (4.49, "kqvxy"),
        (4.73, "bdhnpuoS"),
        (7.09, "m%"),
        (6.62, "w#&+=×±"),
    )
    for character in characters
}


def published(name: str) -> View:
    """Return the view of a published comparison."""
    return View(name, read_runs_csv(ROOT / "results" / "published" / name / "runs.csv"))


def long_names() -> View:
    """Return runs of strategies and models with long names, in every state, of which some differ in much else."""
    names = ("a_hybrid_sharding_over_two_levels_of_a_network", "W" * 60, "fsdp_mit_Überlänge_und_層_and_more")
    return View(
        "long_names & 50 % of #1",
        [
            entry.with_row(
                run_id=f"{number}",
                strategy=f"{names[number % 3]}_{number // 3}",
                model=f"a-model-with-a-name-of-its-own-{number}",
                seq_len=131072 * (number + 1),
                measured_on="NVIDIA H200 NVL " * 3,
                checkpointing=("none", "selective")[number % 2],
                tokens_per_second=entry.row["tokens_per_second"] and 1e7 + number,
            )
            for number, entry in enumerate(records())
        ],
    )


def failing() -> View:
    """Return three repeats of runs that are ok, and runs that ended in every other way."""
    return View("failing", [*thrice(records()[:6]), *records()[6:]])


VIEWS: dict[str, Callable[[], View]] = {
    "failing": failing,
    "long names": long_names,
    "nothing ran": lambda: View("nothing", records()[6:]),
    "quickstart": lambda: published("quickstart"),
    "memory_wall": lambda: published("memory_wall"),
    "three_parallelisms": lambda: published("three_parallelisms"),
}


def typeset(cell: str) -> str:
    """Return the characters that LaTeX shows of a cell."""
    shown = re.sub(r"\\allowbreak\{\}|\\raggedright|\\hangindent=1em |\\(?=[_&%#$])", "", cell)
    return shown.replace(r"$\times$", "×").replace("--", "–").strip()


def table_points(latex: str) -> float:
    """Return the width of the widest table by the widths of its characters, in points."""
    size = re.search(r"\\fontsize\{([\d.]+)\}", latex)
    scale = (float(size[1]) if size else 10.0) / 8
    separation = re.search(r"\\setlength\{\\tabcolsep\}\{([\d.]+)pt\}", latex)
    gap = 2 * (float(separation[1]) if separation else 6.0)
    widest = 0.0
    for form, body in re.findall(r"\\begin\{tabular\}\{(.*?)\}\n(.*?)\\end\{tabular\}", latex, re.DOTALL):
        rows = [line.removesuffix(r" \\").split(" & ") for line in body.splitlines() if line.endswith(r"\\")]
        widths = [
            max(sum(EXACT.get(character, 8.8) for character in typeset(cell)) for cell in cells)
            for cells in zip(*rows, strict=True)
        ]
        if wrapped := re.search(r"p\{([\d.]+)pt", form):
            widths[0] = float(wrapped[1])
        widest = max(widest, scale * sum(widths) + gap * (len(widths) - ("@" in form)))
    return widest


@pytest.mark.parametrize("width", [50.0, COLUMN, 178.0])
@pytest.mark.parametrize("name", VIEWS)
def test_a_table_is_no_wider_than_its_column(name: str, width: float) -> None:
    """The fault was a table of 420 points, as wide as its texts, in a column of 242."""
    latex = latex_table(VIEWS[name](), "median", width)
    assert 0 < table_points(latex) <= width / 25.4 * 72.27


DOCUMENT = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs,graphicx}
\setlength{\columnsep}{0.25in}\setlength{\textwidth}{6.95in}\setlength{\textheight}{9in}
\graphicspath{{export/}}
\begin{document}
\typeout{column \the\columnwidth}
\input{export/table.tex}
\input{export/figures.tex}
\end{document}
"""


@pytest.mark.long
@pytest.mark.parametrize("name", VIEWS)
def test_latex_typesets_a_column_without_a_line_that_is_too_wide(name: str, tmp_path: Path) -> None:
    """The column is 3.35 inches wide. No table is higher than a page."""
    if why := packages.install("LaTeX", ["pdflatex"], ["texlive-latex-base", "texlive-latex-recommended"]):
        pytest.skip(why)
    view = VIEWS[name]()
    drawn = list(charts(sections(view))) if name in ("failing", "long names") else []
    export(tmp_path / "export", view, drawn, ("latex", "pdf"), COLUMN, "median")
    (tmp_path / "paper.tex").write_text(DOCUMENT)
    for _ in range(2):  # the second time with labels
        command = ["pdflatex", "-interaction=nonstopmode", "paper.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        log = (tmp_path / "paper.log").read_text(errors="replace")
        assert done.returncode == 0, log
    faults = ("Overfull \\hbox", "!", "LaTeX Warning: Reference") + ("LaTeX Warning: Float too large",) * (not drawn)
    assert [line for line in log.splitlines() if line.startswith(faults)] == []
    assert "\ncolumn 242.1" in log


def notes(latex: str) -> str:
    """Return what stands below a table."""
    return latex.split("\\raggedright\n")[-1].split("\n\\end{minipage}")[0]


def test_columns_are_left_out_in_their_order_and_named() -> None:
    """First ratios, then bytes sent, the number of runs and the spread; speed and peak memory stay."""
    view = published("quickstart")
    order = ["ranks", "$\\times$ peak", "$\\times$ speed", "sent MiB", "n", "min", "max"]
    (ddp,) = [line for line in view.lines if line.strategy == "ddp"]
    figures = f" & {ddp.speed.median / 1000:.2f} & ", f" & {ddp.peak / 2**20:.2f}"
    seen = set()
    for width in range(50, 130, 2):
        latex = latex_table(view, "median", width)
        (left_out,) = re.findall(r"Left out to fit the width: (.*)\.$", notes(latex)) or [""]
        names = list(filter(None, left_out.replace(" and ", ", ").split(", ")))
        if "configuration &" not in latex:
            assert names == order[: len(names)]
        seen.add(len(names))
        heads = latex.split("\\midrule")[0]
        assert "ktok/s" in heads and "peak" in heads and all(figure in latex for figure in figures)
    assert seen >= {0, 1, 2, 3, 4}


def test_the_number_of_runs_is_a_column_or_a_note() -> None:
    repeated = View("equal", thrice(records()[:6]))
    heads, below = (part(latex_table(repeated)) for part in (lambda text: text.split("\\midrule")[0], notes))
    assert " & n & " not in heads and "median of n = 3 runs" in below
    some = View("different", [*thrice(records()[:6]), replace(records()[1], row=row(30, "ddp", "torch", 0, repeat=3))])
    assert " & n & " in latex_table(some).split("\\midrule")[0]
    assert "median of n runs" in notes(latex_table(some))


def test_cells_have_figures_or_the_status_and_notes_say_what_they_are() -> None:
    latex = latex_table(failing(), "mean", COLUMN)
    rows = {
        line.split(" & ")[0]: line.removesuffix(" \\\\").split(" & ")[1:]
        for line in latex.splitlines()
        if " & " in line
    }
    assert rows["zero3"][:3] == ["12.35", "1.23", "0.77"]
    for strategy, status in (("fsdp\\_shard\\_grad\\_op", "oom"), ("fsdp\\_no\\_shard", "refused")):
        assert rows[strategy][0] == status and not any(rows[strategy][1:])
        assert f"{status}: " in notes(latex)
    assert "sd: the standard deviation" in notes(latex) and "ratio to ddp" in notes(latex)
    assert "8 sequences of 128 tokens" in latex and "runs.csv" not in latex
    assert "90.00" not in latex_table(compared()), "a disturbed speed"
    assert "zero2, as other work disturbed every run" in notes(latex_table(compared()))


def test_the_csv_has_every_column_once_with_one_row_a_configuration() -> None:
    header, *lines = paper_csv(failing(), "median").splitlines()
    titles = header.split(",")
    assert titles == ["strategy", "ranks", "median ktok/s", "min", "max", "× speed", "peak MiB", "× peak", "sent MiB"]
    assert len(lines) == 10 and all(len(line.split(",")) == len(titles) for line in lines)


def drawn_texts(picture: Path) -> str:
    """Return a picture without its description."""
    return re.sub(r'<desc>.*?</desc>|aria-label="[^"]*"', "", picture.read_text(), flags=re.DOTALL)


def png_sizes(picture: Path) -> tuple[int, int]:
    """Return the width in pixels and the pixels of a metre, by the chunks IHDR and pHYs of the file."""
    content = picture.read_bytes()
    density = content[content.index(b"pHYs") + 4 :]
    assert density[8] == 1  # the unit is the metre
    return int.from_bytes(content[16:20]), int.from_bytes(density[:4])


def test_a_png_says_that_it_is_as_wide_as_the_column(tmp_path: Path) -> None:
    """Programs that set it without a width take the one of the file."""
    view = failing()
    export(tmp_path, view, list(charts(sections(view))), ("png",), COLUMN, "median")
    sizes = [png_sizes(picture) for picture in tmp_path.glob("*.png")]
    assert sizes and {pixels for _, pixels in sizes} == {round(300 / 0.0254)}
    assert all(0.97 * COLUMN < 1000 * width / pixels < 1.01 * COLUMN for width, pixels in sizes)


def test_figures_are_captioned_with_runs_and_setting_and_have_no_title(tmp_path: Path) -> None:
    view = failing()
    drawn = list(charts(sections(view)))
    for folder, width in (("column", COLUMN), ("page", None)):
        export(tmp_path / folder, view, drawn, ("svg",), width, "median")
    for chart in drawn:
        column, page = (drawn_texts(tmp_path / folder / f"{chart.name}.svg") for folder in ("column", "page"))
        assert f">{chart.title}<" in page and f">{chart.title}<" not in column and "2026-01-02" not in column
    captions = re.findall(r"\\caption\{(.*)\}", latex_figures(view, drawn, COLUMN))
    assert len(captions) == len(drawn) >= 3
    for caption in captions:
        assert "run 1 to 3 times; n = 3 of these count" in caption and "Setting: tiny" in caption
    assert "[width=85.09mm]" in latex_figures(view, drawn, 85.09)
    assert "[width=\\linewidth]" in latex_figures(view, drawn)
