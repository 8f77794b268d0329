"""Speeds in a report: no winner among identical configurations, and what differs in a step outside its interval."""

import dataclasses
import itertools
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.records.schema import Record
from harness.report import markdown
from harness.report.sources import largest_differences, simulated_parts, sources, step_difference
from harness.report.speeds import Speed, leads
from harness.report.view import View, truncate
from harness.util.files import JsonObject
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


PLANNED: JsonObject = {
    **dict(zip(("step_seconds", "low_seconds", "high_seconds"), (0.5, 0.4, 0.6), strict=True)),
    **dict(zip(("forward_seconds", "backward_seconds", "optimizer_seconds"), (0.12, 0.24, 0.04), strict=True)),
    **dict.fromkeys(("other_seconds", "bubble_seconds", "copy_seconds"), 0.0),
    "exposed_seconds": {"dp_shard": 0.1},
}

# Seconds of kernels in no order of length; a collective is the longest of all.
OPERATORS = {
    "forward/mm": 0.11,
    "forward/_allgather_base_": 0.25,
    "optimizer/_fused_adamw_": 0.04,
    "backward/mm": 0.23,
    "backward/add": 0.05,
    "backward/_reduce_scatter_base_": 0.15,
    "rest/allreduce_": 0.02,
    "norm/allreduce_": 0.01,
}

COLLECTIVES = [key for key in OPERATORS if key.endswith(("_base_", "allreduce_"))]

SIMULATED = {
    "step_seconds": 0.8,
    "phase_seconds": {"forward": 0.12, "backward": 0.25, "norm": 0.01, "optimizer": 0.04},
    "exposed_seconds": {"dp_shard": 0.2, "dp_shard+cp": 0.1},
    "idle_seconds": 0.08,
    "operator_seconds": OPERATORS,
    "communication_operators": COLLECTIVES,
}


def simulated(planned: JsonObject | None = PLANNED, **changes: Any) -> Record:
    """Return the record of a simulated rank with this time."""
    cells = row(1, "fsdp_full_shard", "torch", 3, launch="simulated", step_seconds=SIMULATED["step_seconds"])
    record = record_of(cells | {"predicted_step_seconds": 0.5, "measured_on": "NVIDIA H100 80GB HBM3"})
    ranks = [{"rank": 0, "status": "ok", "simulated_time": SIMULATED | changes}]
    return dataclasses.replace(record, rank_entries=ranks, predicted_step=planned)


def longest(keys: list[str], seconds: dict[str, float]) -> list[tuple[str, str]]:
    """Return the three of these operators that take longest, as a sentence names them."""
    parts = [key.split("/") for key in sorted(keys, key=lambda key: -seconds[key])[:3]]
    return [(name, "outside of the phases" if phase == "rest" else f"in {phase}") for phase, name in parts]


def test_the_operators_that_are_named_are_the_longest() -> None:
    """Every order of the seconds changes what is named, of what computes and of what communicates."""
    computing = [key for key in OPERATORS if key not in COLLECTIVES]
    for order in itertools.permutations((0.32, 0.2, 0.1, 0.05)):
        seconds = dict(zip(computing, order, strict=True)) | dict(zip(COLLECTIVES, order[::-1], strict=True))
        text = step_difference(simulated(operator_seconds=seconds))
        sentences = re.findall(r"The operators that \w+ longest are (.*?)\.(?: |$)", text)
        named = [re.findall(r"(\w+) (in \w+|outside of the phases) \(", sentence) for sentence in sentences]
        assert named == [longest(computing, seconds), longest(COLLECTIVES, seconds)]
        assert f"({1e3 * max(order):.3g} ms, {100 * max(order) / 0.8:.0f} % of the step)" in text


def test_the_parts_that_are_named_differ_most() -> None:
    """Communication along several axes counts to the outermost, and waits of the host to none of the plan's parts."""
    text = step_difference(simulated())
    assert text.startswith(
        "the simulated step takes 800 ms, outside the interval of 400 ms to 600 ms around the 500 ms of the formula."
        " The parts that differ most are exposed communication along dp_shard, 300 ms simulated and 100 ms planned;"
        " waiting for the host, 80 ms simulated and nothing planned."
        " The plan counts waits for the host to forward and backward, and those for an update on the host to the"
        " optimizer. The operators that compute longest are"
        " mm in backward (230 ms, 29 % of the step), mm in forward (110 ms, 14 % of the step) and"
    )
    slow_backward = {"forward": 0.12, "backward_input": 0.3, "backward_weight": 0.24, "norm": 0.01, "optimizer": 0.03}
    text = step_difference(simulated(phase_seconds=slow_backward, exposed_seconds={"dp_shard": 0.1}, idle_seconds=0.0))
    assert "The part that differs most is backward, 540 ms simulated and 240 ms planned. The operators" in text


def test_the_parts_of_a_simulated_step_add_up() -> None:
    (rank,) = simulated(bubble_seconds=0.05).ranks
    assert sum(simulated_parts(rank.simulated_time).values()) == pytest.approx(SIMULATED["step_seconds"])
    assert largest_differences({"forward": 1.0}, {"forward": 1.0}) == {}


def test_a_step_outside_its_interval_alone_has_sentences() -> None:
    silent = [simulated(PLANNED | {"high_seconds": 0.81}), simulated(None), record_of(row(1, "ddp", "torch", 0))]
    assert [step_difference(record) for record in silent] == ["", "", ""]
    page = markdown.page("demo", sources(View("demo", [simulated(), simulated(None)])))
    assert "| 500.0 | 400.0–600.0 | 800.0 | +60.0 |" in page
    assert page.count("The operators that compute longest") == page.count("outside the interval of") == 1
