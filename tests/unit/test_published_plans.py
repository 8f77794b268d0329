"""What is published of plans and comparisons: every figure is a row's, and the rows are what the planner says now."""

import json
import re
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from harness.planner.plan import LayoutPlan, plans
from tests.support.campaigns import read_table
from tests.support.commands import long
from tests.support.planned import planned
from tests.support.published_comparisons import (
    COMPARISONS,
    PAGES,
    PUBLISHED,
    SIMULATIONS,
    read_pages,
    readme,
    write_pages,
)
from tests.support.published_plans import PAGE, SEARCHES, pages, read_rows, rows_of, shown, with_recorded_simulations

GIB = 2**30

GUIDE = PAGE.parent / "guides" / "strategies.md"

CHAINS = read_table(PUBLISHED.parent / "references" / "chains.csv")

QUICK = [search for search in SEARCHES if re.match(r"model=[71]b cluster=\S+ precision", search)][::3]


@pytest.mark.parametrize("page", pages(read_rows()).items(), ids=lambda item: item[0].name)
def test_pages_are_made_of_the_rows(page: tuple[Path, str]) -> None:
    path, text = page
    assert path.read_text() == text, "run python -m tests.support.published_plans --pages"


def test_every_search_has_its_rows() -> None:
    rows = read_rows()
    assert [*dict.fromkeys(row["search"] for row in rows)] == [f"harness plan {search}" for search in SEARCHES]
    for row in rows:
        assert row["fits"] in ("likely", "tight") and row["launch"] == "planned" and not row["status"]
    assert [row["choice"] for row in rows].count("fastest") == len(SEARCHES)


@pytest.mark.parametrize("search", [QUICK[0], *map(long, QUICK[1:])])
def test_rows_are_what_the_planner_says(search: str) -> None:
    """The others are searched by `python -m tests.support.published_plans`, which takes some twenty minutes."""
    found = rows_of(search, with_recorded_simulations(search, planned(*search.split())))
    published = [row for row in read_rows() if row["search"] == found[0]["search"]]
    for row, again in zip(published, found, strict=True):
        names = ("choice", "layout", "overrides", "fits")
        assert {name: row[name] for name in names} == {name: again[name] for name in names}
        names = ("predicted_step_seconds", "predicted_peak_bytes", "communication_bytes", "mfu")
        figures = {name: float(str(again[name])) for name in names}
        assert {name: float(row[name]) for name in names} == pytest.approx(figures, rel=1e-9)


def needed(row: dict[str, str]) -> int:
    """Return the bytes that a device must have: what was simulated, or is reserved and cannot be given back."""
    assert int(row["device_bytes"]) >= int(row["predicted_peak_bytes"]) + int(row["process_bytes"])
    return int(row["device_bytes"])


def test_the_page_s_figures_follow_from_the_rows() -> None:
    """Worked out again: memory, speed and degrees of each line, and that the second layout needs less and is near."""
    rows, text = read_rows(), PAGE.read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \[?\w+b\b", line)]
    fastest = {row["search"]: row for row in rows if row["choice"] == "fastest"}
    least = [row for row in rows if row["choice"] != "fastest"]
    for cells, row in zip(lines, [*fastest.values(), *least], strict=True):
        assert row["model"] in cells[0] and cells[1].startswith(f"{int(row['world_size']):,} × ")
        assert cells[1].endswith("³") == (row["fits"] == "tight")
        axes = (f"{axis} {row[axis]}" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if row[axis] != "1")
        assert cells[2:4] == [f"`{row['overrides']}`", " × ".join(axes)]
        assert row["overrides"].endswith(f"train.micro_batch={row['micro_batch']}")
        assert cells[4 if row in least else 5].startswith(f"{needed(row) / GIB:.1f}")
    for cells, row in zip(lines, fastest.values(), strict=False):
        devices, sequences, length = (int(row[name]) for name in ("world_size", "global_batch", "seq_len"))
        tokens = sequences * length / float(row["predicted_step_seconds"]) / devices
        figures = [f"{sequences:,} × {length:,}", f"{tokens:,.0f}", f"{100 * float(row['mfu']):.0f}"]
        assert [cells[4], cells[6], cells[8]] == figures
        assert float(cells[7].replace(",", "")) == pytest.approx(1e9 / tokens / 3600, rel=0.005)
        assert len(re.sub("[.,]", "", cells[7]).rstrip("0").ljust(3, "0")) == 3
    for cells, row in zip(lines[len(fastest) :], least, strict=True):
        first = fastest[row["search"]]
        longer = 100 * (float(row["predicted_step_seconds"]) / float(first["predicted_step_seconds"]) - 1)
        assert cells[5] == f"+{longer:.0f} %" and 0 <= longer <= 10
        assert needed(row) <= 0.95 * needed(first)
    assert f"For {len(fastest) - len(least)} of the models and clusters above no layout does." in text
    assert ("\n³ The verdict is *tight*" in text) == any(row["fits"] == "tight" for row in rows)


def missing(*sentences: str, page: Path = PAGE) -> list[str]:
    """Return the sentences that a page does not have, however its lines are wrapped."""
    text = " ".join(page.read_text().split())
    return [sentence for sentence in sentences if sentence not in text]


def table(*names: str) -> pd.DataFrame:
    """Return a table of results/, whose index numbers its rows."""
    return pd.read_csv(PUBLISHED.parent.joinpath(*names))


def test_the_page_s_reserves_follow_from_the_simulations() -> None:
    runs = [table("published", f"simulated_{name}", "runs.csv") for name in ("7b", "70b", "405b")]
    ended_ok = pd.concat(run[run.status == "ok"] for run in runs)
    percent = 100 * (ended_ok.peak_reserved_bytes - ended_ok.predicted_peak_bytes) / ended_ok.predicted_peak_bytes
    reserved = table("simulator", "reserved.csv").set_index("source").loc["torchtitan docs/performance.md"]
    sentences = (
        f"In the {len(ended_ok)} published simulated runs that fit, it reserved",
        f" it reserved {percent.min():.0f} to {percent.max():.0f} % more than the predicted peak,",
        f" more than the predicted peak, {percent.median():.0f} % in the median.",
        f"publishes {reserved.measured_bytes / GIB:.1f} GiB reserved for {reserved.model}; the simulated",
        f"reserves {reserved.simulated_bytes / GIB:.1f} GiB",
    )
    assert missing(*sentences) == []


def test_the_page_s_errors_are_those_on_file() -> None:
    errors = table("planner", "errors.csv").query("estimator == 'harness plan'").set_index(["figure", "source"]).value
    medians, means = (100 * errors[f"{kind} error of the step time"] for kind in ("median", "mean"))
    sentences = (
        f"of {len(medians)} published sets of measurements are predicted {medians.min():.1f} to",
        f" to {medians.max():.1f} % off in the median, and {means.min():.1f} to {means.max():.1f} % in the mean",
    )
    assert missing(*sentences) == []


@pytest.mark.long
def test_the_page_s_commands_have_the_layouts_that_it_names() -> None:
    """The plan of the first command finds the row of 7b, that of 48 sequences another, and what is measured fits.

    Without a simulation the fastest is open, as its reserved memory may be too large.
    """
    words = [words.split() for words in re.findall(r"^\| `harness ([^`]+)`", PAGE.read_text(), re.MULTILINE)[:3]]
    (row,) = (row for row in read_rows() if row["report"] == "7b_on_8_h100" and row["choice"] == "fastest")
    found, by_default = (planned(*arguments) for arguments in (words[0][1:], words[0][1:3]))
    found = with_recorded_simulations(row["search"].removeprefix("harness plan "), found)
    assert found.predictions[0].label() == row["layout"]
    assert by_default.predictions[0].config.train.global_batch == 48
    measured = [word for word in words[2] if not word.startswith("repeats=")]
    layouts = [plan for plan in plans([*measured, "cluster=8xh100"]) if isinstance(plan, LayoutPlan)]
    fits = {entry.label(): entry.verdict.fits for plan in layouts for entry in plan.predictions}
    assert len(fits) == 4 and fits.pop(row["layout"]) in ("likely", "tight") and {*fits.values()} == {"likely"}, fits


@pytest.mark.parametrize(
    ("sizes", "least"),
    [
        ([(1.0, 1000), (1.05, 951)], None),  # saves less than 5 %
        ([(1.0, 1000), (1.05, 950)], 950),
        ([(1.0, 1000), (1.05, 900), (1.1, 800), (1.11, 100)], 800),
        ([(1.0, 1000)], None),
    ],
)
def test_a_layout_with_less_memory_saves_a_twentieth(sizes: list[tuple[float, int]], least: int | None) -> None:
    layouts = [
        SimpleNamespace(step_seconds=seconds, device_bytes=size, memory=SimpleNamespace(peak_bytes=size))
        for seconds, size in sizes
    ]
    plan: Any = SimpleNamespace(result=SimpleNamespace(choices=layouts, front=layouts))
    expected = {"fastest": 1000} | ({"least memory": least} if least else {})
    assert {choice: entry.device_bytes for choice, entry in shown(plan)} == expected


def test_the_guide_has_the_planner_s_figures_of_7b_on_eight_gpus() -> None:
    zero3, ddp = (planned(f"strategy={name}", "model=7b", "cluster=8xh100").predictions[0] for name in ("zero3", "ddp"))
    sentences = (
        f"{zero3.memory.peak_bytes / GIB:.1f} GiB a rank, and {zero3.step_seconds:.1f} seconds a step at"
        f" {100 * (zero3.mfu or 0):.0f} % of the device's peak",
        f"needs {ddp.memory.peak_bytes / GIB:.0f} GiB a rank",
    )
    assert missing(*sentences, page=GUIDE) == []


def test_the_guide_has_the_steps_of_its_commands_and_the_layers_of_their_reference() -> None:
    commands = re.findall(r"^\| `harness (-m .+) repeats=4`", GUIDE.read_text(), re.MULTILINE)
    sweeps = (plans([*command.split(), "cluster=8xh100"]) for command in commands)
    layouts = [plan for sweep in sweeps for plan in sweep if isinstance(plan, LayoutPlan)]
    *steps, tp = sorted(entry.step_seconds for plan in layouts for entry in plan.predictions)
    chain = next(chain for chain in CHAINS if chain["machine"] == "8xH100" and chain["model"] == "7b")
    sentences = (
        f"are {steps[0]:.1f} to {steps[-1]:.1f} seconds, but {tp:.0f} of `tp`",
        f"that is {re.findall('compared on (.+ layers)', chain['reference'])[0]}, and",
    )
    assert missing(*sentences, page=GUIDE) == []


def test_every_report_has_its_files_and_its_command() -> None:
    named = {report: search for search, report in SEARCHES.items() if report}
    folders = {path.name: path for path in (PUBLISHED / "plans").iterdir() if path.is_dir()}
    assert folders.keys() == named.keys()
    for name, folder in folders.items():
        assert sorted(path.name for path in folder.iterdir()) == ["figures", "plans.csv", "report.md"]
        report = (folder / "report.md").read_text()
        assert "results_dir" not in report
        assert f"harness plan {named[name]}\n" in report and "](figures/front.svg)" in report
        (row,) = (row for row in read_rows() if row["report"] == name and row["choice"] == "fastest")
        figures = ("overrides", "predicted_peak_bytes", "predicted_step_seconds")
        first = read_table(folder / "plans.csv")[0]
        assert {key: first[key] for key in figures} == {key: row[key] for key in figures}


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
    is_unranked = text.startswith("# Memory and communication of ")
    assert name in SIMULATED or is_unranked == figures.isdisjoint(timed) == (name not in RANKED)


def test_the_archive_has_a_page_of_every_comparison() -> None:
    names = sorted(MEASURED + SIMULATED)
    assert sorted(path.parent.name for path in PUBLISHED.glob("*/runs.csv")) == names
    pages = read_pages()
    assert list(pages) == [f"{name}.html" for name in names]
    titles = {
        name: (PUBLISHED / name / "report.md").read_text().partition("\n")[0].removeprefix("# ") for name in names
    }
    assert [name for name in names if f"<h1>{titles[name]}</h1>".encode() not in pages[f"{name}.html"]] == []
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
    """The two share kernels' rates, and neither was measured. Only a plan counts what DTensor does on the host."""
    (line,) = [line for line in README.splitlines() if f"]({name}/" in line]
    table = pd.read_csv(PUBLISHED / name / "runs.csv")
    ok = table[table["status"] == "ok"]
    assert set(table["launch"]) == {"simulated"}
    for column, predicted in (("step_seconds", "step_seconds"), ("peak_allocated_bytes", "peak_bytes")):
        ratios = ok[column] / ok[f"predicted_{predicted}"]
        ends = dict.fromkeys(f"{100 * (end - 1):+.1f}" for end in (ratios.min(), ratios.max()))
        assert f"| {' to '.join(ends)} %".replace("-", "−") in line
        assert ratios.between(0.7, 1.35).all() or column != "step_seconds"
