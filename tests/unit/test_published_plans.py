"""What is published of plans: every figure of its pages is a row's, and the rows are what the planner says now."""

import csv
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.planner.plan import Plan, plans
from tests.support.published_plans import PAGE, PUBLISHED, SEARCHES, pages, read_rows, rows_of, searched, shown

GIB = 2**30

QUICK = [search for search in SEARCHES if search.nodes == 1 and search.model in ("7b", "1b")][::3]


@pytest.mark.parametrize("page", pages(read_rows()).items(), ids=lambda item: item[0].name)
def test_pages_are_made_of_the_rows(page: tuple[Path, str]) -> None:
    path, text = page
    assert path.read_text() == text, "run python -m tests.support.published_plans --pages"


def test_every_search_has_its_rows() -> None:
    rows = read_rows()
    commands = [" ".join(["harness", "plan", *search.overrides]) for search in SEARCHES]
    assert list(dict.fromkeys(row["search"] for row in rows)) == commands
    for row in rows:
        assert row["fits"] in ("likely", "tight") and row["launch"] == "planned" and not row["status"]
    assert [row["choice"] for row in rows].count("fastest") == len(SEARCHES)


@pytest.mark.parametrize("search", QUICK, ids=lambda search: f"{search.model} {search.cluster}")
def test_rows_are_what_the_planner_says(search: object) -> None:
    """The others are searched by `python -m tests.support.published_plans`, which takes a minute and a half."""
    found = rows_of(search, searched(search))  # type: ignore[arg-type]
    published = [row for row in read_rows() if row["search"] == found[0]["search"]]
    assert len(published) == len(found)
    for row, again in zip(published, found, strict=True):
        for name in ("choice", "layout", "overrides", "fits"):
            assert row[name] == again[name], "run python -m tests.support.published_plans"
        for name in ("predicted_step_seconds", "predicted_peak_bytes", "communication_bytes", "mfu"):
            assert float(row[name]) == pytest.approx(float(str(again[name])), rel=1e-9)


def test_the_page_s_figures_follow_from_the_rows() -> None:
    """Worked out again: memory, speed and degrees of each line, and that the second layout needs less and is near."""
    rows, text = read_rows(), PAGE.read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \[?\w+b\b", line)]
    fastest = [row for row in rows if row["choice"] == "fastest"]
    least = [row for row in rows if row["choice"] != "fastest"]
    assert len(lines) == len(rows)
    for cells, row in zip(lines, [*fastest, *least], strict=True):
        assert row["model"] in cells[0] and f"{int(row['world_size']):,} × " in cells[1]
        assert cells[1].endswith("³") == (row["fits"] == "tight")
        words = shlex.split(row["overrides"])
        assert cells[2] == f"`{' '.join(words[:-1])}`" and words[-1] == f"train.micro_batch={cells[4]}"
        axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
        assert cells[3].split(" × ") == [f"{axis} {row[axis]}" for axis in axes if int(row[axis]) > 1]
        needed = (int(row["predicted_peak_bytes"]) + int(row["process_bytes"])) / GIB
        assert cells[6 if row in fastest else 5].startswith(f"{needed:.1f}")
    for cells, row in zip(lines, fastest, strict=False):
        tokens = int(row["global_batch"]) * int(row["seq_len"]) / float(row["predicted_step_seconds"])
        assert cells[7] == f"{tokens / int(row['world_size']):,.0f}"
        assert cells[8] == f"{100 * float(row['mfu']):.0f}"
    by_search = {row["search"]: row for row in fastest}
    for cells, row in zip(lines[len(fastest) :], least, strict=True):
        first = by_search[row["search"]]
        longer = 100 * (float(row["predicted_step_seconds"]) / float(first["predicted_step_seconds"]) - 1)
        assert cells[6] == f"+{longer:.0f} %" and 0 <= longer <= 10
        sizes = [int(entry["predicted_peak_bytes"]) + int(entry["process_bytes"]) for entry in (row, first)]
        assert sizes[0] <= 0.95 * sizes[1]
    assert f"For {len(fastest) - len(least)} of the models and clusters above no layout does." in text
    assert ("\n³ The verdict is *tight*" in text) == any(row["fits"] == "tight" for row in rows)


class Front:
    """A search's front, with layouts of these seconds and bytes that a device needs."""

    def __init__(self, *sizes: tuple[float, int]) -> None:
        self.best = self.front = [
            SimpleNamespace(
                step_seconds=seconds, needed_bytes=size, memory=SimpleNamespace(peak_bytes=size, process_bytes=0)
            )
            for seconds, size in sizes
        ]


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
    shown_layouts = dict(shown(Plan([], Front(*sizes))))  # type: ignore[arg-type]
    assert shown_layouts["fastest"].needed_bytes == 1000
    assert (shown_layouts["least memory"].needed_bytes if "least memory" in shown_layouts else None) == least


def test_the_guide_has_the_planner_s_figures_of_7b_on_eight_gpus() -> None:
    guide = (PAGE.parent / "guides" / "strategies.md").read_text()
    (plan,) = plans(["strategy=zero3", "model=7b", "cluster=8xh100"])
    assert isinstance(plan, Plan)
    (entry,) = plan.predictions
    figures = f"{entry.memory.peak_bytes / GIB:.0f} GiB a rank, and {entry.step_seconds:.1f} seconds a step"
    assert entry.mfu is not None and f"{figures} at {100 * entry.mfu:.0f} % of the device's peak" in " ".join(
        guide.split()
    )
    (plan,) = plans(["strategy=ddp", "model=7b", "cluster=8xh100"])
    assert isinstance(plan, Plan)
    assert f"needs {plan.predictions[0].memory.peak_bytes / GIB:.0f} GiB a rank" in guide


def test_every_report_has_its_files_and_its_command() -> None:
    named = {search.report: search for search in SEARCHES if search.report}
    assert sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir()) == sorted(named)
    for name, search in named.items():
        folder = PUBLISHED / name
        assert sorted(path.name for path in folder.iterdir()) == ["figures", "plans.csv", "report.md"]
        report = (folder / "report.md").read_text()
        assert f"harness plan {' '.join(search.overrides)}\n" in report and "](figures/front.svg)" in report
        with open(folder / "plans.csv", newline="") as file:
            first = next(csv.DictReader(file))
        (row,) = (row for row in read_rows() if row["report"] == name and row["choice"] == "fastest")
        assert {key: first[key] for key in ("overrides", "predicted_peak_bytes", "predicted_step_seconds")} == {
            key: row[key] for key in ("overrides", "predicted_peak_bytes", "predicted_step_seconds")
        }
