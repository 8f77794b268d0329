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
from harness.metrics.costs import cost_per_billion_tokens, start_up_columns
from harness.records.evidence import StartUp
from harness.records.rank_report import RankReport
from tests.support.commands import compose_config
from tests.support.nvml_tables import Board, install

AMOUNTS = st.floats(1e-3, 1e6)

PARTS = ("start_up_import_seconds", "start_up_join_seconds", "start_up_build_seconds", "first_step_seconds")


UNPRICED, DESCRIBED, COMPILED = map(compose_config, ("cluster=local", "cluster=8xh100", "train.compile=true"))


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
