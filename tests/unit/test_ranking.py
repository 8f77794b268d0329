"""Ranking: no winner among identical configurations, none without three undisturbed runs, and fronts by hand."""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.records.schema import Record
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


@pytest.mark.parametrize(
    ("rivals", "runs", "noise"), [(9, 3, "recorded"), *itertools.product((2, 3), (3, 4, 6), NOISES)]
)
def test_names_of_one_configuration_have_a_winner_in_at_most_5_percent(rivals: int, runs: int, noise: str) -> None:
    """Between two, disjoint ranges of three runs each would be a winner in 10 %."""
    draw, winners = random.Random(f"{rivals} {noise} {runs}"), 0
    for _ in range(1000):
        drawn = [[NOISES[noise](draw) for _ in range(runs)] for _ in range(rivals)]
        speeds = [Speed(statistics.median(own), min(own), max(own), runs, is_disturbed=False) for own in drawn]
        first, *others = sorted(speeds, key=lambda speed: -speed.median)
        winners += leads(first, others)
    assert winners <= 50


def places(view: View, name: str) -> list[int]:
    return sorted(view.lines.index(line) for group in view.groups for line in getattr(group, name))


CLEAR, SLOWER = [1000.0, 1010.0, 1020.0], [900.0, 905.0, 910.0]


@pytest.mark.parametrize(
    ("speeds", "changes", "fastest", "ranked"),
    [
        (SLOWER, {}, [0], 2),
        (SLOWER[:2], {}, [], 1),  # two repeats
        (SLOWER[:1], {}, [], 1),
        ([900.0, 950.0, 999.0], {}, [], 2),  # disjoint, but by less than half of the wider range
        ([900.0, 950.0, 1000.0], {}, [], 2),  # not disjoint
        (SLOWER, {"noise_warning": "other processes took 1.0 of 2 cores"}, [], 1),
        (SLOWER, {"step_seconds_iqr_ratio": None}, [], 1),  # fewer than four steps
        (SLOWER, {"world_size": 4}, [], 1),  # no rival: a group of its own
        (SLOWER, {"precision": "bf16"}, [], 1),
        (SLOWER, {"status": "oom", **FAILED}, [], 1),
    ],
)
def test_a_winner_needs_three_undisturbed_runs_of_each_rival_and_a_clear_range(
    speeds: list[float], changes: dict[str, Any], fastest: list[int], ranked: int
) -> None:
    slower = [record_of(record.row | changes) for record in configuration(2, "slower", speeds)]
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
    """Memory is that of all runs."""
    *calm, last = configuration(1, "ddp", [1000.0, 1010.0, 1020.0, 5000.0], peak_allocated_bytes=MIB)
    (line,) = view_of(
        [*calm, last.with_row(noise_warning="steps became 80% faster", peak_allocated_bytes=2 * MIB)]
    ).lines
    assert line.speed == Speed(1010.0, 1000.0, 1020.0, 3, is_disturbed=False)
    row = {"tokens_per_second": 1010.0, "timed_runs": 3, "noise_warning": None, "peak_allocated_bytes": 2 * MIB}
    assert {name: line.row[name] for name in row} == row
    (line,) = view_of([run.with_row(noise_warning="busy") for run in (*calm, last)]).lines
    assert line.speed.is_disturbed and line.speed.runs == 4 and line.row["noise_warning"] == "busy"


@pytest.mark.parametrize(("speed", "expected"), [(1000.0, []), (950.0, [0])])
def test_an_unranked_run_as_fast_as_the_first_blocks_a_winner(speed: float, expected: list[int]) -> None:
    entries = [configuration(n, str(n), speeds) for n, speeds in enumerate((CLEAR, SLOWER, [speed]))]
    assert places(view_of(*entries), "fastest") == expected


LAYOUT: dict[str, Any] = {"engine": "torch", "data_parallel": "none", "tp": 1, "pp": 1, "schedule": "1f1b"}


def program(number: int, name: str, speeds: list[float], steps: int = 10, **layout: Any) -> list[Record]:
    """Return runs of a configuration on one rank."""
    config: dict[str, Any] = {"strategy": {"name": name}, "train": {"steps": steps}}
    return [
        replace(run, layout=LAYOUT | {"virtual_stages": 1} | layout, config=config)
        for run in configuration(number, name, speeds, world_size=1)
    ]


def test_identical_programs_are_no_rivals() -> None:
    """On one rank, tp and a pipeline of one stage are the same program; ddp wraps the model, and is another one."""
    tp = program(0, "tp", CLEAR, sequence_parallel=True)
    stage = program(1, "pp_1f1b", [990.0, 1005.0, 1008.0], schedule="gpipe", virtual_stages=2)
    ddp = program(2, "ddp", SLOWER, data_parallel="ddp")
    first, second, third = (line.program for line in view_of(tp, stage, ddp).lines)
    assert first == second != third
    assert places(view_of(tp, stage, ddp), "fastest") == [0, 1]
    assert places(view_of(tp, stage), "fastest") == []  # nothing to beat
    assert len({line.program for line in view_of(tp, program(1, "pp_1f1b", CLEAR, steps=20), ddp).lines}) == 3


def test_places_are_those_among_all_runs_where_few_are_drawn() -> None:
    """The front of a part is the front of the whole: a line that an undrawn one beats is not on it."""
    best = configuration(1, "pp", CLEAR, peak_allocated_bytes=MIB, micro_batch=1)
    worse = configuration(2, "fsdp", SLOWER, peak_allocated_bytes=2 * MIB, micro_batch=2)
    view = view_of(configuration(3, "ddp", [2e3, 2001.0, 2002.0], peak_allocated_bytes=3 * MIB), worse, best)
    assert places(view, "front") == [0, 2]
    shown = {line.row["strategy"]: line.is_on_front for line in truncate(view, 6).lines}
    assert shown == {"ddp": True, "fsdp": False}
