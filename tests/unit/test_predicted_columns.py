"""The step time that a run's row predicts, which needs a description of its device."""

import dataclasses
from pathlib import Path

import pytest

from harness.config.hardware import HardwareConfig
from harness.hardware.machine import Machine
from harness.runner.plan import Plan, make_plan
from harness.runner.predicted_columns import described_devices, predicted_columns
from tests.support.commands import compose

H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (80 * 10**9,) * 8, 64, device_bytes=80 * 10**9)


def plan_on(machine: Machine, *overrides: str) -> Plan:
    """Return the plan of ddp on two ranks."""
    config, command = compose("strategy=ddp", "world_size=2", "model=tiny", "data=synthetic", *overrides)
    return make_plan(config, machine, command)


def step_seconds(plan: Plan) -> float:
    """Return the predicted step time of a plan that has one."""
    seconds = predicted_columns(plan)["predicted_step_seconds"]
    assert isinstance(seconds, float)
    return seconds


def test_a_described_device_has_a_predicted_step_time() -> None:
    """All files describe different devices, and a device without a file has no prediction of time, only of memory."""
    assert described_devices()[H100.device_name].memory_bytes > 79 * 2**30
    seconds = step_seconds(plan_on(H100))
    assert 0 < seconds < 1
    assert step_seconds(plan_on(H100, "train.seq_len=64")) != seconds
    unknown = predicted_columns(plan_on(dataclasses.replace(H100, device_name="NVIDIA X1")))
    assert unknown["predicted_step_seconds"] is None
    assert unknown["predicted_peak_bytes"] is not None
    plan = plan_on(H100)
    compiled = dataclasses.replace(plan.config, train=dataclasses.replace(plan.config.train, compile=True))
    assert predicted_columns(dataclasses.replace(plan, config=compiled)) == {}


def test_the_cluster_s_own_file_counts_before_others() -> None:
    plan = plan_on(H100)
    own = described_devices()[H100.device_name]
    slower = dataclasses.replace(own, peak_flops=1e12, memory_bandwidth=1e10)
    assert isinstance(slower, HardwareConfig)
    cluster = dataclasses.replace(plan.config.cluster, hardware=slower)
    slow = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cluster=cluster))
    assert step_seconds(slow) > 2 * step_seconds(plan)


@pytest.mark.parametrize("text", ["a: b: c", "- 1", "name: x\nhardware: {device_name: y}", "hardware: 3"])
def test_a_mistake_in_another_cluster_s_file_stops_no_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    (folder / "0.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    described_devices.cache_clear()
    try:
        assert H100.device_name in described_devices()
    finally:
        described_devices.cache_clear()
