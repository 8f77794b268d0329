"""What a plan gives: overrides that run the same layout, intervals that measured steps lie in, and a report."""

import csv
import re
import shlex
from functools import lru_cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.from_dict import from_dict
from harness.config.locations import files_in
from harness.config.stack import StackTiming, load_stack
from harness.cost_model.timing.step_time import UNMEASURED_RANGE, StepTime
from harness.planner.row import PLACE_COLUMNS, planned_row, run_command, run_overrides, strategy_presets
from harness.report.charts import render
from harness.util.text import UserError
from tests.benchmarks.time_intervals import SEEDS, STACKS, TimedRow, fit_range, held_out, timed_rows
from tests.support.planned import planned

ROOT = Path(__file__).parents[2]

GIB = 2**30

SEARCH = (
    "model=7b",
    "cluster=8xh100",
    "train.micro_batch=2",
    "train.global_batch=64",
    "strategy.tp=1",
    "strategy.cp=1",
    "plan.simulate=false",
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


SEARCHES = (
    "model=7b cluster=8xh100 precision=bf16_mixed train.seq_len=4096 train.global_batch=128",
    "model=13b cluster=8xa100_40 cluster.nodes=2 train.global_batch=32 strategy.pp=4 checkpointing=every_n",
    "model=3b cluster=8xl40s precision=fp32 train.global_batch=16 strategy.tp=1 strategy.offload=optimizer",
    "model=7b cluster=8xrtx4090 train.global_batch=8 checkpointing.offload_activations=true train.micro_batch=1",
)


@pytest.mark.parametrize("settings", SEARCHES)
def test_the_command_of_a_layout_plans_what_the_search_found(settings: str) -> None:
    words = settings.split()
    result = planned(*words).result
    assert result is not None and result.front
    for entry in [*result.best, *result.front[::4]]:
        command = shlex.split(run_command(words, entry.config))
        assert command[0] == "harness"
        (same,) = planned(*command[1:]).predictions
        assert (same.layout, same.config.checkpointing) == (entry.layout, entry.config.checkpointing)
        figures = (entry.step_seconds, entry.sent_bytes, entry.memory)
        assert (same.step_seconds, same.sent_bytes, same.memory) == figures
        row, again = planned_row(entry), planned_row(same)
        assert row == again  # the strategy's name and the overrides, too
        assert row["strategy"] == same.config.strategy.name and f"strategy={row['strategy']}" in command


def test_a_preset_needs_no_override_of_its_own_layout() -> None:
    """Each preset's own strategy is written as its name alone, or as that of a preset with the same values."""
    for preset in strategy_presets():
        depends_on_the_machine = any(str(value).startswith("${") for value in preset.values())
        if depends_on_the_machine or preset["name"] == "tp_pp":  # which has four ranks, whatever the world
            continue
        precision = "fp32" if preset["name"] in ("zero1_torch", "dp") else "bf16_mixed"
        words = ("model=7b", "cluster=8xh100", "train.global_batch=64", "train.micro_batch=8", f"precision={precision}")
        (prediction,) = planned(*words, f"strategy={preset['name']}").predictions
        assert [word for word in run_overrides(prediction.config) if word.startswith("strategy.")] == [], preset["name"]


def test_other_stacks_have_no_command() -> None:
    words = ("model=7b", "cluster=8xh100", "stack=megatron", "train.global_batch=16", "checkpointing=full")
    row = planned_row(planned(*words).result.best[0])
    assert row["strategy"] == "search" and "overrides" not in row


@lru_cache(maxsize=1)
def nanotron() -> list[TimedRow]:
    """Return the rows of nanotron's grid with an MFU of 10 % or more."""
    return timed_rows("nanotron")


def test_nine_of_ten_steps_of_other_groups_lie_inside() -> None:
    """The range is fitted to half of the groups; the other half counts, for five ways to halve them."""
    shares, half_widths = zip(*(held_out(nanotron(), seed) for seed in SEEDS), strict=True)
    assert len(nanotron()) > 300
    assert mean(shares) >= 0.9 and min(shares) >= 0.85 and max(half_widths) <= 0.2


@pytest.mark.parametrize("stack", STACKS)
def test_the_range_on_file_is_the_fitted_one(stack: str) -> None:
    """Where a fit changed, python -m tests.benchmarks.time_intervals prints the range to write into the file."""
    rows = nanotron() if stack == "nanotron" else timed_rows(stack)
    on_file = load_stack(stack).timing.measured_over_predicted
    assert on_file == pytest.approx(fit_range(rows), abs=0.03)
    assert on_file is not None and mean(entry.is_inside(on_file) for entry in rows) >= 0.9


def test_a_plain_range_would_be_wider() -> None:
    """Widths that grow with exposed communication are what makes the median interval narrow."""
    ratios = sorted(entry.ratio for entry in nanotron())
    outside = round(0.03 * len(ratios))
    plain = (ratios[-outside] - ratios[outside]) / 2
    assert median(entry.half_width(fit_range(nanotron())) for entry in nanotron()) < 0.9 * plain


def step(exposed: float) -> StepTime:
    """Return a step of one second, so much of it exposed communication."""
    return StepTime(1 - exposed, {"tp": exposed}, 0.0, 0.0, 0.0, 1, 0.1, 0.2, 0.0)


def test_intervals_grow_with_exposed_communication_and_nodes() -> None:
    timing = StackTiming(measured_over_predicted=(0.9, 1.2))
    assert step(0.0).interval(timing, 64) == pytest.approx((0.9, 1.2))
    steps = ((0.0, 1), (0.2, 1), (0.2, 8), (0.5, 8))
    intervals = (step(exposed).interval(timing, nodes) for exposed, nodes in steps)
    widths = [high - low for low, high in intervals]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert step(0.4).spread(1) == pytest.approx(2.0)
    assert step(0.0).interval(StackTiming(), 1) == pytest.approx(UNMEASURED_RANGE)


def test_a_stack_without_measurements_has_the_range_of_the_least_predictable_one() -> None:
    """No range on file is wider than the one that stands in where there is none."""
    low, high = UNMEASURED_RANGE
    for name in files_in("stack"):
        on_file = load_stack(name).timing.measured_over_predicted
        assert on_file is None or (low <= on_file[0] and on_file[1] <= high), name
    with pytest.raises(UserError, match=r"stack.timing.measured_over_predicted=\(1.1, 1.2\) is not a range around 1"):
        from_dict(StackTiming, {"measured_over_predicted": (1.1, 1.2)}, "stack.timing")


def test_a_plan_has_its_interval() -> None:
    (prediction,) = planned("model=7b", "cluster=8xh100", "cluster.nodes=2", "strategy=fsdp_full_shard").predictions
    cells = planned_row(prediction)
    low, seconds, high = (float(str(cells[f"predicted_step_{name}seconds"])) for name in ("low_", "", "high_"))
    assert 0 < low < seconds < high
    assert (low, high) == pytest.approx(prediction.time.interval(prediction.stack.timing, 2))
