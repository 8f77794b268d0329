"""The report's sentences on a simulated step that lies outside the plan's interval: its parts and longest operators."""

import dataclasses
import itertools
import re
from typing import Any

import pytest

from harness.records.schema import Record
from harness.report import markdown
from harness.report.sources import largest_differences, simulated_parts, sources, step_difference
from harness.report.view import View
from harness.util.files import JsonObject
from tests.support.example_records import record_of, row

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
    assert rank.simulated_time is not None
    assert sum(simulated_parts(rank.simulated_time).values()) == pytest.approx(SIMULATED["step_seconds"])
    assert largest_differences({"forward": 1.0}, {"forward": 1.0}) == {}


def test_a_step_outside_its_interval_alone_has_sentences() -> None:
    silent = [simulated(PLANNED | {"high_seconds": 0.81}), simulated(None), record_of(row(1, "ddp", "torch", 0))]
    assert [step_difference(record) for record in silent] == ["", "", ""]
    page = markdown.page("demo", sources(View("demo", [simulated(), simulated(None)])))
    assert "| 500.0 | 400.0–600.0 | 800.0 | +60.0 |" in page
    assert page.count("The operators that compute longest") == page.count("outside the interval of") == 1
