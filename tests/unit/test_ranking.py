"""Ranking: no winner among identical configurations, none without three undisturbed runs, and fronts by hand."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.records.schema import Record
from harness.report.charts.tradeoffs import trade
from harness.report.lines import Line
from harness.report.ranking import rank
from harness.report.speeds import Speed, leads
from harness.report.view import View, truncate
from tests.support.example_records import FAILED, MIB, record_of, row

# The speeds of 27 runs over the medians of their nine configurations, as a comparison on two busy cores recorded them.
RECORDED = (
    *(0.796, 0.848, 0.882, 0.899, 0.927, 0.954, 0.976, 0.982, 0.998, 1.0, 1.0, 1.0, 1.0, 1.0),
    *(1.0, 1.0, 1.0, 1.0, 1.053, 1.057, 1.099, 1.121, 1.136, 1.137, 1.173, 1.389, 1.399),
)

NOISES: dict[str, Callable[[random.Random], float]] = {
    "recorded": lambda draw: draw.choice(RECORDED) + draw.gauss(0, 0.002),
    "normal": lambda draw: draw.gauss(1, 0.03),
    "uniform": lambda draw: draw.uniform(0.9, 1.1),
    "slow_tail": lambda draw: 1 - draw.expovariate(20),
    "two_valued": lambda draw: draw.choice((0.8, 1.0)) + draw.gauss(0, 0.005),
}


def configuration(number: int, name: str, speeds: Sequence[float], **changes: Any) -> list[Record]:
    """Return a run for each speed, as repeats of one configuration."""
    return [
        record_of(row(10 * number + repeat, name, "torch", 0, repeat=repeat, tokens_per_second=speed, **changes))
        for repeat, speed in enumerate(speeds)
    ]


def view_of(*configurations: list[Record]) -> View:
    return View("ranked", [record for entry in configurations for record in entry])


def test_nine_names_of_one_configuration_have_a_winner_in_at_most_5_percent() -> None:
    draw, drawn = random.Random(1), 1000
    lines = view_of(*(configuration(number, f"name{number}", [1.0, 1.0, 1.0]) for number in range(9))).lines
    winners = 0
    for _ in range(drawn):
        drawn_speeds = [[1000 * NOISES["recorded"](draw) for _ in line.runs] for line in lines]
        speeds = [Speed(statistics.median(own), min(own), max(own), 3, is_disturbed=False) for own in drawn_speeds]
        _, (group,) = rank([replace(line, speed=speed) for line, speed in zip(lines, speeds, strict=True)])
        assert len(group.ranked) == 9 and bool(group.fastest) != bool(group.contenders)
        winners += bool(group.fastest)
    assert winners <= 0.05 * drawn


@pytest.mark.parametrize("runs", [3, 4, 6])
@pytest.mark.parametrize("rivals", [2, 3])
@pytest.mark.parametrize("noise", NOISES)
def test_few_names_of_one_configuration_have_a_winner_in_at_most_5_percent(rivals: int, noise: str, runs: int) -> None:
    """Between two, disjoint ranges of three runs each would be a winner in 10 %."""
    draw, drawn = random.Random(f"{rivals} {noise} {runs}"), 1000

    def speed() -> Speed:
        speeds = [NOISES[noise](draw) for _ in range(runs)]
        return Speed(statistics.median(speeds), min(speeds), max(speeds), runs, is_disturbed=False)

    winners = 0
    for _ in range(drawn):
        first, *others = sorted((speed() for _ in range(rivals)), key=lambda speed: -speed.median)
        winners += leads(first, others)
    assert winners <= 0.05 * drawn


def places(view: View, name: str) -> list[int]:
    return sorted(view.lines.index(line) for group in view.groups for line in getattr(group, name))


CLEAR, SLOWER = [1000.0, 1010.0, 1020.0], [900.0, 905.0, 910.0]


@pytest.mark.parametrize(
    ("changes", "fastest", "ranked"),
    [
        ({}, [0], 2),
        ({"speeds": SLOWER[:2]}, [], 1),  # two repeats
        ({"speeds": SLOWER[:1]}, [], 1),
        ({"speeds": [900.0, 950.0, 999.0]}, [], 2),  # disjoint, but by less than half of the wider range
        ({"speeds": [900.0, 950.0, 1000.0]}, [], 2),  # not disjoint
        ({"noise_warning": "other processes took 1.0 of 2 cores"}, [], 1),
        ({"step_seconds_iqr_ratio": None}, [], 1),  # fewer than four steps
        ({"world_size": 4}, [], 1),  # no rival: a group of its own
        ({"precision": "bf16"}, [], 1),
        ({"status": "oom", **FAILED}, [], 1),
    ],
)
def test_a_winner_needs_three_undisturbed_runs_of_each_rival_and_a_clear_range(
    changes: dict[str, Any], fastest: list[int], ranked: int
) -> None:
    speeds = changes.pop("speeds", SLOWER)
    slower = configuration(2, "slower", speeds)
    slower = [record_of(record.row | changes) for record in slower]
    ranked_view = view_of(configuration(1, "first", CLEAR), slower)
    assert places(ranked_view, "fastest") == fastest
    assert max(len(group.ranked) for group in ranked_view.groups) == ranked


@pytest.mark.parametrize(("runs", "is_winner"), [(3, False), (4, True), (6, True)])
def test_disjoint_ranges_of_four_runs_or_more_need_no_distance(runs: int, is_winner: bool) -> None:
    slower, faster = ([base + 10.0 * number / runs for number in range(runs)] for base in (991.0, 1000.0))
    ranked_view = view_of(configuration(1, "first", faster), configuration(2, "second", slower))
    assert places(ranked_view, "fastest") == ([0] if is_winner else [])
    fewer = view_of(configuration(1, "first", faster), configuration(2, "second", slower[-3:]))
    assert places(fewer, "fastest") == []


def test_a_single_disturbed_run_leaves_the_median_of_the_others() -> None:
    runs = configuration(1, "ddp", [1000.0, 1010.0, 1020.0, 5000.0], peak_allocated_bytes=MIB)
    runs[3].row.update({"noise_warning": "steps became 80% faster", "peak_allocated_bytes": 2 * MIB})
    (line,) = view_of(runs).lines
    assert line.speed == Speed(1010.0, 1000.0, 1020.0, 3, is_disturbed=False)
    assert (line.row["tokens_per_second"], line.row["timed_runs"], line.row["noise_warning"]) == (1010.0, 3, None)
    assert line.row["peak_allocated_bytes"] == 2 * MIB  # memory is that of all runs
    for run in runs:
        run.row["noise_warning"] = "busy"
    (line,) = view_of(runs).lines
    assert line.speed.is_disturbed and line.speed.runs == 4 and line.row["noise_warning"] == "busy"


def test_an_unranked_run_as_fast_as_the_first_blocks_a_winner() -> None:
    entries = [configuration(1, "first", CLEAR), configuration(2, "second", SLOWER)]
    assert places(view_of(*entries), "fastest") == [0]
    for speed, expected in ((1000.0, []), (950.0, [0])):
        assert places(view_of(*entries, configuration(3, "alone", [speed])), "fastest") == expected


def test_identical_programs_are_no_rivals() -> None:
    """On one rank, tp and a pipeline of one stage are the same program; ddp wraps the model, and is another one."""
    layout: dict[str, Any] = {
        "engine": "torch",
        "data_parallel": "none",
        "tp": 1,
        "pp": 1,
        "schedule": "1f1b",
        "virtual_stages": 1,
    }
    entries = []
    programs: list[tuple[str, dict[str, Any], list[float]]] = [
        ("tp", {"sequence_parallel": True}, CLEAR),
        ("pp_1f1b", {"schedule": "gpipe", "virtual_stages": 2}, [990.0, 1005.0, 1008.0]),
        ("ddp", {"data_parallel": "ddp"}, SLOWER),
    ]
    for number, (name, changes, speeds) in enumerate(programs):
        runs = configuration(number, name, speeds, world_size=1)
        config: Any = {"strategy": {"name": name}, "train": {"steps": 10}}
        entries.append([replace(run, layout=layout | changes, config=config) for run in runs])
    ranked_view = view_of(*entries)
    first, second, third = (line.program for line in ranked_view.lines)
    assert first == second != third
    assert places(ranked_view, "fastest") == [0, 1]
    assert places(view_of(*entries[:2]), "fastest") == []  # nothing to beat
    longer: Any = {"strategy": {"name": "pp_1f1b"}, "train": {"steps": 20}}
    entries[1] = [replace(run, config=longer) for run in entries[1]]
    assert len({line.program for line in view_of(*entries).lines}) == 3


@pytest.mark.parametrize("seed", range(10))
def test_the_front_has_those_that_are_certainly_faster_than_those_before(seed: int) -> None:
    draw = random.Random(seed)
    entries = []
    for number in range(draw.randint(2, 14)):
        middle, peak = draw.randint(1, 8) * 100, draw.randint(1, 6) * MIB
        speeds = [middle * draw.gauss(1, 0.05) for _ in range(draw.choice((1, 3, 3, 4)))]
        entries.append(configuration(number, f"s{number}", speeds, peak_allocated_bytes=peak))
    view = view_of(*entries)
    expected: list[Line] = []
    ordered = sorted(
        (line for line in view.lines if line.speed.is_ranked), key=lambda line: (line.peak, -line.speed.median)
    )
    for count, line in enumerate(ordered):
        beaten = any(leads(other.speed, [line.speed]) for other in ordered[:count])
        if leads(line.speed, [other.speed for other in expected]) and not beaten:
            expected.append(line)
    (group,) = view.groups
    assert group.front == expected == sorted(expected, key=lambda line: line.peak)
    assert [line for line in view.lines if line.is_on_front] == sorted(expected, key=view.lines.index)
    assert {line.peak for line in group.smallest} == {min(line.peak for line in view.lines)}


def test_places_are_those_among_all_runs_where_few_are_drawn() -> None:
    """The front of a part is the front of the whole: a line that an undrawn one beats is not on it."""
    best = configuration(1, "pp", CLEAR, peak_allocated_bytes=MIB, micro_batch=1)
    worse = configuration(2, "fsdp", SLOWER, peak_allocated_bytes=2 * MIB, micro_batch=2)
    last = configuration(3, "ddp", [2000.0, 2001.0, 2002.0], peak_allocated_bytes=3 * MIB)
    view = View("whole", [*last, *worse, *best])
    assert places(view, "front") == [0, 2]
    part = truncate(view, 6)
    assert [line.row["strategy"] for line in part.lines] == ["ddp", "fsdp"]
    assert [line.is_on_front for line in part.lines] == [True, False]
    chart = trade(part)
    assert chart is not None and "pp" not in chart.alt_text


def test_no_module_takes_the_spread_of_steps_for_certainty() -> None:
    """It is a figure of the time section, and tells whether enough steps were timed."""
    folder = Path(__file__).parents[2] / "harness" / "report"
    users = {path.name for path in folder.rglob("*.py") if "step_seconds_iqr_ratio" in path.read_text(encoding="utf-8")}
    assert users <= {"speeds.py", "resources.py", "derivations.py"}
