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

RANKED = [comparison.name for comparison in COMPARISONS if "repeats=6" in comparison.command]

README = (PUBLISHED / "README.md").read_text()


@pytest.mark.parametrize("name", MEASURED + SIMULATED)
def test_a_report_has_its_table_and_exactly_the_figures_that_it_links(name: str) -> None:
    """It names no path and no host; without ranked speeds it says so, and draws none."""
    folder, text = PUBLISHED / name, (PUBLISHED / name / "report.md").read_text()
    figures = {path.name for path in (folder / "figures").iterdir()}
    assert {path.name for path in folder.iterdir()} == {"report.md", "runs.csv", "figures"}
    assert sorted(re.findall(r"\]\(figures/([\w-]+\.svg)\)", text)) == sorted(figures)
    assert not re.search(r"/(tmp|home|work|root|mnt)/", text + (folder / "runs.csv").read_text())
    timed = {f"{name}.svg" for name in ("throughput", "trade", "scaling", "step", "exposed")}
    is_unranked = "This compares memory and communication, not speed." in text.split("## What the data cannot say")[0]
    assert name in SIMULATED or is_unranked == figures.isdisjoint(timed) == (name not in RANKED)


def test_the_archive_has_a_page_of_every_comparison() -> None:
    names = sorted(MEASURED + SIMULATED)
    assert sorted(path.parent.name for path in PUBLISHED.glob("*/runs.csv")) == names
    pages = read_pages()
    assert list(pages) == [f"{name}.html" for name in names]
    assert [name for name in names if f"<h1>{name}</h1>".encode() not in pages[f"{name}.html"]] == []
    with zipfile.ZipFile(PUBLISHED / PAGES) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}


def test_equal_pages_make_equal_archives(tmp_path: Path) -> None:
    pages = {"b.html": b"two", "a.html": b"one"}
    archives = set()
    for order in (pages, dict(reversed(pages.items()))):
        write_pages(tmp_path, order)
        archives.add((tmp_path / PAGES).read_bytes())
    assert len(archives) == 1 and read_pages(tmp_path) == pages


def test_the_readme_is_generated_and_has_the_counts_of_every_table() -> None:
    """The published self-test has no failure, and all passed that a processor can show."""
    assert readme() == README
    shown = re.findall(r"^\| \[(\w+)\].* \| ([^|]+) \| (\d+) \| [^|]+ \|$", README, re.MULTILINE)
    tables = {name: pd.read_csv(PUBLISHED / name / "runs.csv") for name in MEASURED}
    counts = {name: Counter(table[table["repeat"] == 0]["status"]).most_common() for name, table in tables.items()}
    assert shown == [
        (name, ", ".join(f"{n} {status}" for status, n in counts[name]), str(len(table)))
        for name, table in tables.items()
    ]
    steps = json.loads((PUBLISHED / "selftest" / "selftest.json").read_text())["steps"]
    outcomes = Counter(step["outcome"] for step in steps.values())
    assert outcomes.keys() == {"passed", "skipped"} and outcomes["passed"] >= 14
    assert f"\n{outcomes['passed']} passed, {outcomes['skipped']} skipped.\n" in README


@pytest.mark.parametrize("name", SIMULATED)
def test_the_readme_has_what_simulations_differ_by_from_the_formula(name: str) -> None:
    """The two share kernels' rates, and neither was measured."""
    (line,) = [line for line in README.splitlines() if f"]({name}/" in line]
    table = pd.read_csv(PUBLISHED / name / "runs.csv")
    ok = table[table["status"] == "ok"]
    assert set(table["launch"]) == {"simulated"}
    for column, predicted in (("step_seconds", "step_seconds"), ("peak_allocated_bytes", "peak_bytes")):
        ratios = ok[column] / ok[f"predicted_{predicted}"]
        ends = dict.fromkeys(f"{100 * (end - 1):+.1f}" for end in (ratios.min(), ratios.max()))
        assert f"| {' to '.join(ends)} %".replace("-", "−") in line
        assert ratios.between(0.75, 1.35).all() or column != "step_seconds"
