"""What a run costs beside its steps: the arithmetic of a start, of energy and of a price, from hand-made ranks."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config.hardware import HardwareConfig
from harness.config.schema import RunConfig
from harness.measure import host_usage
from harness.metrics.costs import checkpoint_columns, cost_per_billion_tokens, start_up_columns
from harness.proof.checkpoint import checkpoint_problems
from harness.records.evidence import CheckpointReport, StartUp
from harness.records.rank_report import RankReport
from harness.report.costs import costs
from harness.report.document import Paragraph, Table
from harness.report.view import View
from tests.support.commands import compose_config
from tests.support.example_records import MIB, record_of, row
from tests.support.nvml_tables import Board, install

AMOUNTS = st.floats(1e-3, 1e6)

PARTS = ("start_up_import_seconds", "start_up_join_seconds", "start_up_build_seconds", "first_step_seconds")


UNPRICED, DESCRIBED = map(compose_config, ("cluster=local", "cluster=8xh100"))

COMPILED, SAVING = map(compose_config, ("train.compile=true", "train.save=sync"))


def priced(price: float | None) -> RunConfig:
    """Return a run on a described cluster whose devices cost this much an hour."""
    assert isinstance(DESCRIBED.cluster.hardware, HardwareConfig)
    hardware = dataclasses.replace(DESCRIBED.cluster.hardware, price_per_device_hour=price)
    return dataclasses.replace(DESCRIBED, cluster=dataclasses.replace(DESCRIBED.cluster, hardware=hardware))


@given(AMOUNTS, st.integers(1, 4096), AMOUNTS)
def test_a_price_is_that_of_the_devices_for_the_time_of_the_tokens(price: float, devices: int, speed: float) -> None:
    cost = cost_per_billion_tokens(priced(price), devices, speed)
    hours = 1e9 / speed / 3600
    assert cost == pytest.approx(devices * hours * price, rel=1e-9)
    assert cost_per_billion_tokens(priced(None), devices, speed) is None
    assert cost_per_billion_tokens(UNPRICED, devices, speed) is None


@given(st.lists(st.tuples(*[st.floats(0.001, 100)] * 5), min_size=1, max_size=8))
def test_the_parts_of_a_start_are_those_of_the_slowest_rank(parts: Sequence[tuple[float, ...]]) -> None:
    ranks = [RankReport(start_up=StartUp(*each)) for each in parts]
    columns = start_up_columns(UNPRICED, ranks)
    values: list[Any] = [columns[name] for name in PARTS]
    assert sum(values) == pytest.approx(max(sum(each[:4]) for each in parts))
    assert tuple(values) in {each[:4] for each in parts}
    assert columns["compile_seconds"] is None
    compiled = start_up_columns(COMPILED, ranks)["compile_seconds"]
    assert (*values, compiled) in set(parts)


def test_ranks_of_earlier_versions_have_no_start() -> None:
    assert start_up_columns(UNPRICED, [RankReport.from_json({"rank": 0})]) == {}


@pytest.mark.parametrize(
    ("boards", "seconds", "joules"),
    [
        ((Board("GPU-0", millijoules=iter((500, 4500))), Board("GPU-1", millijoules=iter((90, 2090)))), 3.0, 6.0),
        ((Board("GPU-0", millijoules=iter((500, 4500))), Board("GPU-1")), 3.0, None),  # one has no counter
        ((Board("GPU-0", millijoules=iter((500, 4500))),), 1.0, None),  # too short for a counter that moves in steps
        ((Board("GPU-0", millijoules=iter((500, 4500)), mig=(1, 1)),), 3.0, None),  # the counter is of the whole device
        ((Board("GPU-0", millijoules=pynvml.NVMLError_GpuIsLost),), 3.0, None),
    ],
)
def test_energy_is_that_of_all_devices_during_the_steps(
    monkeypatch: pytest.MonkeyPatch, boards: tuple[Board, ...], seconds: float, joules: float | None
) -> None:
    install(monkeypatch, boards)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device.index)))
    clock = iter((100.0, 100.0 + seconds))
    monkeypatch.setattr(host_usage.time, "perf_counter", lambda: next(clock))
    meter = host_usage.HostUsageMeter([torch.device("cuda", index) for index in range(len(boards))], helpers=())
    meter.begin()
    assert meter.end().energy_joules == joules


TEXTS = st.dictionaries(
    st.sampled_from(("the loss", "the gradient norm", "exp_avg of x")), st.text(max_size=3), min_size=1
)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.data())
def test_a_value_that_differs_on_any_rank_is_a_problem(steps: list[dict[str, str]], data: st.DataObject) -> None:
    """A value that one side lacks differs too, and so does a rank that reports no checkpoint or an empty step."""
    reports = [CheckpointReport(uninterrupted=step, resumed={**step}) for step in steps]
    ranks = [RankReport(rank=number, checkpoint=report) for number, report in enumerate(reports)]
    assert [*checkpoint_problems(SAVING, ranks)] == []
    place = data.draw(st.integers(0, len(ranks) - 1))
    name = data.draw(st.sampled_from(sorted(steps[place])))
    for change in (steps[place] | {name: "other"}, {key: steps[place][key] for key in steps[place].keys() - {name}}):
        changed = [*ranks]
        changed[place] = RankReport(rank=place, checkpoint=reports[place]._replace(resumed=change))
        (problem,) = checkpoint_problems(SAVING, changed)
        assert problem.startswith(f"checkpoint: in the step after loading {name} differs on rank {place}")
        assert [*checkpoint_problems(UNPRICED, changed)] == []
    for lacking in (None, CheckpointReport()):
        (problem,) = checkpoint_problems(SAVING, [RankReport(rank=7, checkpoint=lacking)])
        assert "rank 7" in problem


def test_a_checkpoint_costs_what_its_slowest_and_largest_ranks_say() -> None:
    reports = [
        CheckpointReport(1.0, 5.0, 0.5, 70, 100, 9, "ext4", {"the loss": "1"}, {"the loss": "1"}),
        CheckpointReport(2.0, 4.0, 0.7, 30, 100, 8, "ext4"),
    ]
    ranks = [RankReport.from_json({"rank": 0, "checkpoint": [*report]}) for report in reports]
    assert checkpoint_columns(ranks) == {
        "save_seconds": 2.0,
        "save_total_seconds": 5.0,
        "load_seconds": 0.7,
        "checkpoint_rank_bytes": 70,
        "checkpoint_bytes": 100,
        "save_peak_bytes": 9,
        "save_file_system": "ext4",
    }
    assert checkpoint_columns([RankReport()]) == {}


def test_the_report_shows_what_rows_have_and_nothing_for_old_ones() -> None:
    times = dict(zip((*PARTS, "save_seconds", "load_seconds"), (0.25, 0.5, 0.75, 1.5, 2.5, 3.5), strict=True))
    new = times | {"save": "sync", "save_total_seconds": 2.5, "checkpoint_bytes": 12 * MIB, "save_file_system": "ext4"}
    new |= {"joules_per_token": 0.02}
    old, started, saving = (row(number, name, "torch", 0) for number, name in enumerate(("ddp", "tp", "cp")))
    started |= times | {"save_seconds": None, "load_seconds": None, "cost_per_billion_tokens": 70.0}
    assert costs(View("old", [record_of(old)])) == []
    (section,) = costs(View("all", [record_of(entry) for entry in (old, started, saving | new)]))
    table, note = section.parts
    assert isinstance(table, Table) and isinstance(note, Paragraph)
    rows = [dict(zip(table.header, cells, strict=True)) for cells in table.rows]
    assert [each["run"] for each in rows] == ["tp", "cp"]
    assert [each["first step s"] for each in rows] == ["1.50", "1.50"] and "compiling s" not in rows[0]
    assert (rows[0]["saving s"], rows[1]["saving s"]) == ("", "2.50")
    assert rows[1]["checkpoint MiB"] == "12.00" and rows[1]["file system"] == "ext4"
    assert str(rows[0]["price of a billion tokens"]) == "70.00"
    words = ("Imports", "a checkpoint is saved", "The energy per token", "price_per_device_hour")
    assert all(text in note.text for text in words) and "Compiling" not in note.text
