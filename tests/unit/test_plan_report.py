"""The report of a search as Markdown: its files, its figures and what is refused."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.planner.row import PLACE_COLUMNS
from harness.report.charts import render

ROOT = Path(__file__).parents[2]

GIB = 2**30

SEARCH = (
    "model=7b",
    "cluster=8xh100",
    "train.micro_batch=2",
    "train.global_batch=64",
    "strategy.tp=1",
    "strategy.cp=1",
)


def report_of(folder: Path, *arguments: str) -> tuple[str, list[dict[str, str]]]:
    """Return the page of a search as Markdown, and the rows beside it."""
    assert main(["plan", "--report", str(folder / "report.md"), *arguments]) == 0
    with open(folder / "plans.csv", newline="") as file:
        return (folder / "report.md").read_text(), list(csv.DictReader(file))


def test_markdown_has_a_chart_and_its_rows_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has no page of its own folder yet; drawing would start a process."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(render, "svgs", lambda specs: drawn.update(specs) or dict.fromkeys(specs, "<svg/>"))
    folder = tmp_path / "a" / "plan"
    page, rows = report_of(folder, *SEARCH)
    assert sorted(path.name for path in folder.iterdir()) == ["figures", "plans.csv", "report.md"]
    links = re.findall(r"\]\((figures/.+?)\)", page)
    assert links == ["figures/front.svg"] and (folder / links[0]).read_text() == "<svg/>"
    points = drawn["front"]["datasets"]["rows"]
    best, front = (
        sorted((row for row in rows if row[place]), key=lambda row: int(row[place])) for place in PLACE_COLUMNS
    )
    assert [int(row["place_among_best"]) for row in best] == list(range(1, 6))
    assert len(front) == len(points) and len({tuple(row.items()) for row in rows}) == len(rows)
    lines = re.findall(r"^\| (.+?) \| ([\d.]+) \| (\w+) \| ([\d.]+) \| ([\d,]+) \| (.+) \|$", page, re.MULTILINE)
    for line, row, point in zip(lines, front, points, strict=True):
        needed = (int(row["predicted_peak_bytes"]) + int(row["process_bytes"])) / GIB
        step, rate = float(row["predicted_step_seconds"]), float(row["tokens_per_second"])
        figures = (f"{needed:.1f}", row["fits"], f"{step:.4g}", f"{rate:,.0f}")
        assert line == (point["label"], *figures, row["overrides"])
        assert (point["x"], point["y"]) == (pytest.approx(needed, abs=1e-3), pytest.approx(rate, rel=1e-6))
    tokens = int(best[0]["global_batch"]) * int(best[0]["seq_len"])
    limit = float(front[0]["memory_limit_bytes"]) / GIB
    sentences = (
        f"64 sequences of 4,096 tokens, {tokens:,} in all",
        f"In the 79.1 GiB of a device {sum(float(line[1]) <= limit for line in lines)} of {len(front)} layouts fit",
        f"**The command of this plan**: harness plan {' '.join(SEARCH)}",
    )
    assert [sentence for sentence in sentences if sentence not in page] == []


def test_without_a_drawing_the_page_has_no_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(specs: object) -> None:
        raise render.DrawingError("no library")

    monkeypatch.setattr(render, "svgs", fail)
    page, rows = report_of(tmp_path, *SEARCH, "strategy.zero_stage=3", "strategy.engine=torch", "strategy.pp=1")
    assert "figures/" not in page and not (tmp_path / "figures").exists() and rows
    assert "the page has no chart: no library" in capsys.readouterr().err


@pytest.mark.parametrize("name", ("report.txt", "report", "report.md.gz"))
def test_other_pages_are_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--report", str(tmp_path / name), *SEARCH]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "choose one that ends in .html or .md" in text and not list(tmp_path.iterdir())
