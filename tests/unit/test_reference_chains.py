"""What references cost on nodes of eight GPUs: when the first row comes, that every row is proven, and by which chain.

The runs are planned, and nothing is trained: see tests/support/reference_chains.py.
"""

from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.campaigns import Line, read_table
from tests.support.commands import ROOT
from tests.support.reference_chains import COLUMNS, DEVICES, MODELS, STRATEGIES, Laboratory, chain_lines, plan_on

FIRST_ROW_SECONDS = {"8xA100-80": 900, "8xH100": 600, "8xH200": 600}


def published(name: str, model: str) -> list[dict[str, str]]:
    table = read_table(ROOT / "results" / "references" / "chains.csv")
    return [line for line in table if (line["machine"], line["model"]) == (name, model)]


def shown(lines: list[Line]) -> list[dict[str, str]]:
    return [{column: str(line[column]) for column in COLUMNS} for line in lines]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_row_is_proven_and_the_first_one_comes_soon(name: str, model: str) -> None:
    """A run of fsdp_full_shard has a chain of its own, by zero3, which only the cases marked `long` plan for all."""
    strategies = STRATEGIES if model == "7b" else ("zero3", "tp")
    lines = list(chain_lines(name, model, strategies))
    assert [line["proven"] for line in lines] == ["yes"] * len(strategies), lines
    if model == "7b":
        assert lines[0]["seconds"] <= FIRST_ROW_SECONDS[name]
    assert shown(lines) == [line for line in published(name, model) if line["strategy"] in strategies]


def test_the_log_says_before_a_chain_how_long_it_takes(tmp_path: Path) -> None:
    laboratory, plan = Laboratory(), plan_on("8xH100", "zero3", str(tmp_path), "model=7b")
    with laboratory.replacing_runs():
        seconds, _, _ = laboratory.reference(plan)
        laboratory.reference(plan)  # by then all of it is recorded
    chain, *references = laboratory.log
    planned = "at the speed of the plan for NVIDIA H100 80GB HBM3"
    each = "138 s on 1 device, 24 s on 8 devices, 58 s on 8 devices, and 45 s of each for start and measurement"
    assert chain == f"3 references before this run, predicted to take {seconds:,.0f} s: {each}"
    words = [line.rpartition(", ")[2] for line in references]
    assert words[0] == f"predicted to train for 138 s {planned}" and len(words) == 3
    root = laboratory.launched[0].run_id
    assert all(word.endswith(f" at the speed of {root}") for word in words[1:]), words


@pytest.mark.parametrize(("launches", "slowness"), [(1, 0.25), (2, 0.25), (1, 4.0)])
def test_a_resumed_comparison_trains_no_other_chain(launches: int, slowness: float, tmp_path: Path) -> None:
    """The first record shows that the machine is faster or slower than planned: other layers and steps seem cheap."""

    def trained(laboratory: Laboratory, results: Path) -> list[str]:
        with laboratory.replacing_runs(), suppress(KeyboardInterrupt):
            for strategy in ("zero3", "tp"):
                _, _, reference = laboratory.reference(plan_on("8xH100", strategy, str(results), "model=7b"))
                assert reference.report is not None, reference.note
        return [run.run_id for run in laboratory.launched]

    whole = trained(Laboratory(slowness), tmp_path / "whole")
    laboratory = Laboratory(slowness, launches)
    assert trained(laboratory, tmp_path / "resumed") == whole[:launches]
    laboratory.launches = 1000
    assert trained(laboratory, tmp_path / "resumed") == whole


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_the_published_chains_are_those_of_today(name: str, model: str) -> None:
    lines = list(chain_lines(name, model))
    assert {line["proven"] for line in lines} == {"yes"}
    assert shown(lines) == published(name, model)
