"""What is published of the comparisons: complete, of one making, and described by README.md as its tables are."""

import json
import re
import zipfile
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tests.support.published_comparisons import (
    COMPARISONS,
    PAGES,
    PUBLISHED,
    SIMULATIONS,
    read_pages,
    readme,
    write_pages,
)

MEASURED = [comparison.name for comparison in COMPARISONS]

SIMULATED = [comparison.name for comparison in SIMULATIONS]

NAMES = MEASURED + SIMULATED


def test_every_published_folder_is_a_comparison_and_has_no_page_or_binary_table() -> None:
    assert sorted(path.parent.name for path in PUBLISHED.glob("*/runs.csv")) == sorted(NAMES)
    files = [path for name in NAMES for path in (PUBLISHED / name).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".md", ".csv", ".svg"}


@pytest.mark.parametrize("name", NAMES)
def test_a_report_has_its_table_and_exactly_the_figures_that_it_links(name: str) -> None:
    folder = PUBLISHED / name
    assert {path.name for path in folder.iterdir()} == {"report.md", "runs.csv", "figures"}
    linked = re.findall(r"\]\((figures/[\w-]+\.svg)\)", (folder / "report.md").read_text())
    assert sorted(linked) == sorted(f"figures/{path.name}" for path in (folder / "figures").iterdir())


def test_the_archive_has_a_page_of_every_comparison() -> None:
    pages = read_pages()
    assert list(pages) == sorted(f"{name}.html" for name in NAMES)
    for name in NAMES:
        assert f"<h1>{name}</h1>".encode() in pages[f"{name}.html"]
    with zipfile.ZipFile(PUBLISHED / PAGES) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}


def test_equal_pages_make_equal_archives(tmp_path: Path) -> None:
    pages = {"b.html": b"two", "a.html": b"one"}
    archives = []
    for order in (pages, dict(reversed(pages.items()))):
        write_pages(tmp_path, order)
        archives.append((tmp_path / PAGES).read_bytes())
    assert archives[0] == archives[1] and read_pages(tmp_path) == pages


def test_the_readme_is_generated_and_has_the_counts_of_every_table() -> None:
    text = (PUBLISHED / "README.md").read_text()
    assert text == readme()
    rows = {
        row[0]: row for row in re.findall(r"^\| \[(\w+)\].* \| ([^|]+) \| (\d+) \| ([^|]+) \|$", text, re.MULTILINE)
    }
    assert list(rows) == MEASURED
    for name, (_, counts, runs, _) in rows.items():
        table = pd.read_csv(PUBLISHED / name / "runs.csv")
        first = Counter(table[table["repeat"] == 0]["status"])
        assert int(runs) == len(table) and counts == ", ".join(f"{n} {status}" for status, n in first.most_common())


def test_the_published_self_test_has_no_failure_and_the_counts_of_the_readme() -> None:
    steps = json.loads((PUBLISHED / "selftest" / "selftest.json").read_text())["steps"]
    outcomes = [step["outcome"] for step in steps.values()]
    passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
    assert passed + skipped == len(outcomes) and passed >= 14  # all that a processor can show
    assert f"\n{passed} passed, {skipped} skipped.\n" in (PUBLISHED / "README.md").read_text()


def test_the_readme_has_what_simulations_differ_by_from_the_formula() -> None:
    lines = [line for line in (PUBLISHED / "README.md").read_text().splitlines() if "](simulated_" in line]
    assert len(lines) == len(SIMULATED)
    for name, line in zip(SIMULATED, lines, strict=True):
        table = pd.read_csv(PUBLISHED / name / "runs.csv")
        assert set(table["launch"]) == {"simulated"}
        ok = table[table["status"] == "ok"]
        for column in ("step_seconds", "peak_allocated_bytes"):
            predicted = column.replace("peak_allocated", "peak")
            changes = 100 * (ok[column] / ok[f"predicted_{predicted}"] - 1)
            ends = [f"{changes.min():+.1f}", f"{changes.max():+.1f}"][: len(changes)]
            assert f"| {' to '.join(ends)} %".replace("-", "−") in line
        steps = ok["step_seconds"] / ok["predicted_step_seconds"]
        assert ((steps > 0.75) & (steps < 1.35)).all()  # the two share kernels' rates, and neither was measured


def test_reports_without_ranked_speeds_say_so_and_draw_none() -> None:
    ranked = [comparison.name for comparison in COMPARISONS if "repeats=6" in comparison.command]
    for name in MEASURED:
        summary = (PUBLISHED / name / "report.md").read_text().split("## What the data cannot say")[0]
        figures = {path.stem for path in (PUBLISHED / name / "figures").iterdir()}
        assert ("This compares memory and communication, not speed." in summary) == (name not in ranked)
        assert figures.isdisjoint({"throughput", "trade", "scaling", "step", "exposed"}) == (name not in ranked)


def test_published_files_name_no_path_and_no_host() -> None:
    for name in NAMES:
        text = (PUBLISHED / name / "report.md").read_text() + (PUBLISHED / name / "runs.csv").read_text()
        assert not re.search(r"/(tmp|home|work|root|mnt)/", text)
