"""The predicted step times beside the published ones of nanotron's grid on H100, and faults that move them apart."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from harness.config.hardware import HardwareConfig
from harness.config.stack import StackTiming, load_stack
from harness.cost_model.timing.step_time import estimate_step_time
from harness.hardware.described_cluster import described_devices
from harness.layout.layout import resolve_layout
from tests.support.commands import compose
from tests.support.published import PublishedRow, nanotron
from tests.support.published.time_scores import ERROR, ORDER, REGRET, time_scores

Scores = dict[str, float]

H100 = "NVIDIA H100 80GB HBM3"


@lru_cache(maxsize=1)
def grid() -> tuple[PublishedRow, ...]:
    """Return the rows that ran."""
    return tuple(row for row in nanotron.rows() if row.status == "ok" and "step_seconds" in row.measured)


# Bounds on the figures of the whole grid, to which the parameters were fitted (5.2 % and 89 %).
MOST_ERROR, LEAST_ORDER = 0.06, 0.88


def scores(hardware: HardwareConfig, timing: StackTiming, gpus_per_node: int | None = None) -> Scores:
    """Return the figures of all rows, on this hardware with this stack; `gpus_per_node` replaces that of the rows."""

    def seconds(row: PublishedRow) -> float:
        devices = gpus_per_node or row.gpus_per_node
        return estimate_step_time(row.config, row.layout, hardware, timing, None, devices).step_seconds

    return dict(time_scores(grid(), list(map(seconds, grid()))))


def test_published_step_times_are_predicted_and_ordered() -> None:
    figures = scores(described_devices()[H100], load_stack("nanotron").timing)
    assert len(grid()) == 756
    assert figures[ERROR] <= MOST_ERROR
    assert figures[ORDER] >= LEAST_ORDER


def _fitted(**factors: float) -> Callable[[HardwareConfig], HardwareConfig]:
    def changed(hardware: HardwareConfig) -> HardwareConfig:
        values: dict[str, Any] = {name: getattr(hardware.fitted, name) * factor for name, factor in factors.items()}
        return dataclasses.replace(hardware, fitted=dataclasses.replace(hardware.fitted, **values))

    return changed


FAULTS: dict[str, Callable[[HardwareConfig], HardwareConfig]] = {
    "products twice as fast": _fitted(matmul_efficiency=2),
    "memory twice as fast": _fitted(memory_efficiency=2),
    "links in a node ten times slower": _fitted(intra_node_efficiency=0.1),
    "steps between nodes a hundred times slower": _fitted(inter_node_latency=100),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_hardware_worsens_the_figures(fault: str) -> None:
    """Each fault breaks one of the two bounds."""
    timing = load_stack("nanotron").timing
    honest, broken = (scores(hardware, timing) for hardware in _pair(FAULTS[fault]))
    assert broken[ERROR] > MOST_ERROR or broken[ORDER] < LEAST_ORDER, (fault, honest, broken)


def _pair(change: Callable[[HardwareConfig], HardwareConfig]) -> tuple[HardwareConfig, HardwareConfig]:
    hardware = described_devices()[H100]
    return hardware, change(hardware)


def test_misplaced_axes_and_forgotten_delays_worsen_the_figures() -> None:
    """Tensor-parallel ranks share a node as far as they fit; with one device a node all their collectives leave it."""
    hardware, timing = described_devices()[H100], load_stack("nanotron").timing
    honest = scores(hardware, timing)
    assert scores(hardware, timing, gpus_per_node=1)[ERROR] > 0.2
    for name in ("collective_launch_seconds", "pipelined_collective_seconds_per_rank", "inter_node_step_seconds"):
        forgotten: dict[str, Any] = {name: 0.0}
        broken = scores(hardware, dataclasses.replace(timing, **forgotten))
        assert broken[ERROR] > 0.08 or broken[ORDER] < honest[ORDER] - 0.003, (name, broken)


# Tokens per second and GPU of llm-foundry on 8 x H100-80 (scripts/train/benchmarking/README.md): model, micro-batch.
FOUNDRY = {("mpt_1b", 14): 45455, ("mpt_7b", 6): 10643, ("mpt_13b", 2): 4792}


def foundry_errors(change: Callable[[HardwareConfig], HardwareConfig]) -> list[float]:
    """Return the errors of llm-foundry's rates, of which nothing was fitted: by another implementation and model."""
    errors = []
    for (model, micro_batch), measured in FOUNDRY.items():
        config, _ = compose(
            *("strategy=fsdp_full_shard", f"model={model}", "world_size=8", "precision=bf16_mixed", "data=synthetic"),
            *("train.seq_len=2048", f"train.micro_batch={micro_batch}", f"train.global_batch={8 * micro_batch}"),
        )
        layout, timing = resolve_layout(config.strategy, 8), load_stack("harness").timing
        seconds = estimate_step_time(config, layout, change(described_devices()[H100]), timing, None, 8).step_seconds
        errors.append(abs(micro_batch * 2048 / seconds / measured - 1))
    return errors


def test_rates_of_llm_foundry_are_predicted_without_a_fit() -> None:
    assert max(foundry_errors(lambda hardware: hardware)) < 0.05
    for change in (_fitted(matmul_efficiency=1.2), _fitted(memory_efficiency=2), _fitted(attention_efficiency=2)):
        assert max(foundry_errors(change)) > 0.05


def test_a_step_s_parts_add_up_and_larger_work_takes_longer() -> None:
    """For every row: more tokens, slower memory or slower links never make a step shorter."""
    hardware, timing = described_devices()[H100], load_stack("nanotron").timing
    slower = [
        dataclasses.replace(hardware, memory_bandwidth=hardware.memory_bandwidth / 2),
        dataclasses.replace(hardware, intra_node_bandwidth=hardware.intra_node_bandwidth / 2),
        dataclasses.replace(hardware, inter_node_bandwidth=hardware.inter_node_bandwidth / 2),
    ]
    for row in grid()[::10]:
        step = estimate_step_time(row.config, row.layout, hardware, timing, None, row.gpus_per_node)
        exposed = step.exposed_communication_seconds.values()
        parts = (step.compute_seconds, *exposed, step.bubble_seconds, step.optimizer_seconds, step.other_seconds)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(step.step_seconds)
        for other in slower:
            assert estimate_step_time(
                row.config, row.layout, other, timing, None, row.gpus_per_node
            ).step_seconds >= step.step_seconds * (1 - 1e-9)


def test_the_copies_of_slices_decide_what_is_chosen_on_up_to_256_devices() -> None:
    """The fault: shard_slice_seconds left out. Without it ZeRO's stage 1 is chosen where stage 0 is faster."""
    rows = [row for row in grid() if row.layout.world_size <= 256]
    hardware, timing = described_devices()[H100], load_stack("nanotron").timing

    def slowdown(timing: StackTiming) -> float:
        seconds = [
            estimate_step_time(row.config, row.layout, hardware, timing, None, row.gpus_per_node).step_seconds
            for row in rows
        ]
        return dict(time_scores(rows, seconds))[REGRET]

    assert slowdown(timing) <= 0.03
    assert slowdown(dataclasses.replace(timing, shard_slice_seconds=0.0)) > 0.05
