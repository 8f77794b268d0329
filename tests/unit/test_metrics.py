"""A row's figures from two hand-made ranks that differ in everything: no rank is left out, and no unit changes."""

from typing import Any

import pytest

from harness.cost_model.parts import STEP_PARTS
from harness.layout.layout import resolve_layout
from harness.metrics.columns import measured_columns
from harness.metrics.memory import at_peak_columns, memory_columns
from harness.metrics.step_time import pipeline_entries
from harness.metrics.traffic import bytes_by_axis
from harness.records.rank_report import RankReport
from tests.support.commands import compose_config

PHASES = {"data": 0.05, "forward": 0.3, "backward": 0.4, "norm": 0.05, "optimizer": 0.1}  # shares of a step


SIZES = "train.global_batch=8 train.seq_len=32"


def rank(number: int, seconds: list[float], peak: int, device: str = "NVIDIA H200", **profiled: Any) -> dict[str, Any]:
    blocks = [("parameter", 100), ("optimizer", 200), ("gradient", 50), ("activation", 300), ("temporary", peak - 650)]
    parts = [{"role": role, "what": "", "bytes": size} for role, size in blocks]
    sent = {"operation": "all_reduce", "group_ranks": [0, 1], "dtype": "float32", "purpose": "layout"}
    sent |= {"bytes_sent": 50.0, "count": 1, "sizes": {"50": 1}}
    shares = {name: {"seconds": share, "exposed_seconds": 0, "waiting_seconds": 0} for name, share in PHASES.items()}
    shares["backward"]["exposed_seconds"] = 0.1  # a quarter of it
    shares["rest"] = {"seconds": 0.1, "exposed_seconds": 0.0, "waiting_seconds": 0.08}
    return {
        "rank": number,
        "devices": 1,
        "skipped_steps": 0,
        "device_name": device,
        "step_seconds": seconds,
        "phase_seconds": {name: [share * second for second in seconds] for name, share in PHASES.items()},
        "losses": [4.0 + number, 2.0 + number],
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": None,
        "parameter_bytes": 100 + number,
        "optimizer_bytes": 200 - number,
        "outside_bytes": None,
        "allocation_retries": None,
        "out_of_memory_errors": None,
        "traced": {"seconds": 1.0, "phases": shares, "overlapped_seconds": 0.2},
        "used": {
            "pid": number,
            "host": "h",
            "seconds": 1.0,
            "cpu_seconds": 3.0 + number,
            "helper_cpu_seconds": 0.0,
            "cores": 2,
            "core_seconds": 2.0,
            "busy_seconds": 0.1,
            "stolen_seconds": 0.0,
            "energy_joules": 10.0,
            "peak_host_bytes": 7000 + number,
            "clocks_lowered": None,
            "device_pids": None,
        },
        "placed": {"parameters": {"cuda": 100}, "gradients": {"cpu": 50}, "optimizer": {"cpu": 200 + number}},
        "profiled": {
            "gradient_bytes": 300 + number,
            "activation_bytes": 400 - number,
            "offloaded_activation_bytes": 0,
            "in_flight": 1 + number,
            "flops": 10**9,
            "peak_allocated_bytes": peak,
            "at_peak": {"phase": "backward", "bytes": peak, "parts": parts},
            "communication": [sent] * (1 + number),
        }
        | profiled,
    }


def reports(*ranks: dict[str, Any]) -> list[RankReport]:
    return [RankReport.from_json(values) for values in ranks]


def measured_on(*ranks: dict[str, Any], overrides: str = "") -> dict[str, Any]:
    """Return the columns of a run of these ranks, which train as many steps as the first one timed."""
    config = compose_config(f"train.steps={len(ranks[0]['step_seconds'])}", *overrides.split())
    return measured_columns(config, resolve_layout(config.strategy, len(ranks)), reports(*ranks))


def test_figures_are_the_whole_worlds() -> None:
    ranks = [rank(0, [1.0, 2.0, 9.0], 1000), rank(1, [3.0, 1.0, 1.0], 1500)]
    measured = measured_on(*ranks, overrides=SIZES)
    assert measured["step_seconds"] == 3.0  # the slowest rank of each step: 3, 2 and 9; their median
    assert measured["step_seconds_p95"] == pytest.approx(3 + 0.9 * 6) and measured["step_seconds_iqr_ratio"] is None
    assert measured["tokens_per_second"] == pytest.approx(8 * 32 / 3.0)
    assert measured["tokens_per_second_per_device"] == pytest.approx(8 * 32 / 3.0 / 2)
    assert (measured["peak_allocated_bytes"], measured["peak_rank"], measured["peak_reserved_bytes"]) == (1500, 1, None)
    assert (measured["parameter_bytes"], measured["optimizer_bytes"]) == (101, 200)
    assert (measured["gradient_bytes"], measured["activation_bytes"]) == (301, 400)
    assert (measured["offloaded_bytes"], measured["offloaded_activation_bytes"]) == (251, None)
    assert measured["communication_bytes"] == 100
    assert (measured["loss_first"], measured["loss_last"]) == (4.5, 2.5)
    assert measured["at_peak_temporary_bytes"] == 850 and measured["peak_phase"] == "backward"
    assert measured["executed_flops"] == 2 * 10**9
    assert measured["cpu_seconds"] == pytest.approx(7 / 3) and measured["peak_rss_bytes"] == 7001
    assert measured["joules_per_token"] == pytest.approx(20 / (3 * 8 * 32))
    peak = 2 * 67e12  # of two devices in fp32
    assert measured["mfu"] == pytest.approx(measured["model_flops"] / 3.0 / peak)
    assert measured["hfu"] == pytest.approx(2e9 / 3.0 / peak)
    ranks[1]["device_name"] = "NVIDIA H201"
    unknown = measured_on(*ranks, overrides=SIZES)
    assert unknown["mfu"] is None and unknown["model_flops_per_second_per_device"] is not None


def test_figures_that_the_profiler_missed_are_unknown_and_not_zero() -> None:
    measured = measured_on(*(rank(number, [1.0, 2.0, 9.0], 1000) | {"traced": None} for number in range(2)))
    names = ("exposed_communication", "exposed_copy", "idle", "overlapped_communication")
    unknown = [f"{name}_seconds" for name in names]
    assert [measured[name] for name in unknown] == [None] * 4
    assert sum(measured[name] for name in STEP_PARTS if name not in unknown) == pytest.approx(measured["step_seconds"])


def test_a_gpu_waits_as_long_as_it_is_not_busy() -> None:
    """The profiler delays the host, so that a GPU waits longer in traced steps, but is busy for as long."""
    for delay in (0.0, 3.0):
        values = rank(0, [1.0], 1000)
        for share in values["traced"]["phases"].values():  # two steps are traced
            share["seconds"], share["exposed_seconds"] = 1.4 * share["seconds"] + delay, 1.4 * share["exposed_seconds"]
            share["waiting_seconds"] = delay
        values["traced"] |= {"seconds": 1.4 + 6 * delay, "overlapped_seconds": 0.28}
        measured = measured_on(values)
        assert measured["idle_seconds"] == pytest.approx(0.3)
        assert measured["exposed_communication_seconds"] == pytest.approx(0.07)
        assert measured["overlapped_communication_seconds"] == pytest.approx(0.14)
        assert sum(measured[name] for name in STEP_PARTS) == pytest.approx(1.0)


def test_a_cpu_that_waits_inside_its_phases_prepares_messages() -> None:
    values = rank(0, [1.0], 1000, "cpu")
    forward = values["traced"]["phases"]["forward"]
    forward["waiting_seconds"] = 0.5 * forward["seconds"]
    measured = measured_on(values)
    assert measured["forward_seconds"] == pytest.approx(0.3)


def test_the_kernels_of_several_devices_divide_no_step() -> None:
    """A device waits while others compute, and a trace does not tell whose kernels are whose."""
    measured = measured_on(rank(0, [1.0], 1000) | {"devices": 4})
    assert measured["idle_seconds"] is measured["exposed_communication_seconds"] is None
    assert measured["overlapped_communication_seconds"] is None and measured["forward_seconds"] == pytest.approx(0.3)


def test_a_gpu_that_was_busy_for_longer_never_waits() -> None:
    values = rank(0, [0.25], 1000)
    values["traced"]["phases"]["rest"]["waiting_seconds"] = 0.0
    measured = measured_on(values)
    assert measured["idle_seconds"] == pytest.approx(0.0, abs=1e-9)
    assert measured["exposed_communication_seconds"] == pytest.approx(0.25 * 0.1)
    assert sum(measured[name] for name in STEP_PARTS) == pytest.approx(0.25)


@pytest.mark.parametrize("fullest", range(3))
def test_memory_is_the_fullest_ranks_wherever_it_is(fullest: int) -> None:
    """The fullest rank is neither the first, which is often reported, nor the last."""
    ranks = [rank(number, [1.0], 1500 if number == fullest else 1000) for number in range(3)]
    measured = memory_columns(reports(*ranks))
    assert (measured["peak_allocated_bytes"], measured["peak_rank"], measured["at_peak_temporary_bytes"]) == (
        1500,
        fullest,
        850,
    )


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Phases are by the clock, of the slowest rank in the median step, each divided as the traced phases were."""
    ranks = [rank(0, [1.0, 2.0, 9.0], 1000, "cpu"), rank(1, [3.0, 1.0, 1.0], 1500, "cpu")]
    ranks[1]["phase_seconds"]["forward"][0] = 1.2  # 0.4 of the step
    measured = measured_on(*ranks)
    expected = {"data": 0.15, "forward": 1.2, "backward": 0.9, "optimizer": 0.45, "exposed_communication": 0.3}
    assert {name: measured[f"{name}_seconds"] for name in expected} == pytest.approx(expected)
    assert measured["idle_seconds"] == pytest.approx(0.8 * 0.0, abs=1e-9)  # all but the phases is 0 here
    assert measured["overlapped_communication_seconds"] == pytest.approx(0.6)
    assert sum(measured[name] for name in STEP_PARTS) == pytest.approx(measured["step_seconds"])
    even = measured_on(rank(0, [1.0, 2.0, 4.0, 8.0], 1000, "cpu"))
    assert sum(even[name] for name in STEP_PARTS) == pytest.approx(even["step_seconds"]) and even["step_seconds"] == 3.0
    assert even["idle_seconds"] == pytest.approx(0.08 * 3) and even["other_seconds"] == pytest.approx(0.02 * 3)
    assert even["step_seconds_iqr_ratio"] == pytest.approx((5 - 1.75) / 3)


def test_waiting_of_a_pipeline_is_idle() -> None:
    values = rank(0, [10.0], 1000, "cpu")
    values["traced"]["phases"]["norm"]["exposed_seconds"] = 0.05  # all of it: there the stages meet
    measured = measured_on(values, rank(1, [5.0], 900), overrides="strategy=pp_1f1b")
    assert measured["idle_seconds"] == pytest.approx(0.5 + 0.8) and measured["other_seconds"] == pytest.approx(0.2)
    assert measured["exposed_communication_seconds"] == pytest.approx(1.0)


def test_a_profiled_step_unlike_the_timed_ones_explains_nothing() -> None:
    values = rank(0, [1.0], 1000)
    values["profiled"]["at_peak"]["parts"][-1]["bytes"] -= 40
    assert at_peak_columns(RankReport.from_json(values)) == {}
    near = rank(0, [1.0], 1000) | {"peak_reserved_bytes": 1200}
    near["profiled"]["peak_allocated_bytes"] -= 40
    near["profiled"]["at_peak"]["bytes"] -= 40
    near["profiled"]["at_peak"]["parts"][-1]["bytes"] -= 40
    assert at_peak_columns(RankReport.from_json(near))["at_peak_unmatched_bytes"] == 40
    for lost in (-1, 300):  # blocks that the log lacks are no rounding
        odd = rank(0, [1.0], 1000) | {"peak_reserved_bytes": 1200}
        odd["profiled"]["at_peak"]["bytes"] -= lost
        assert at_peak_columns(RankReport.from_json(odd)) == {}
    on_gpu = rank(0, [1.0], 1000) | {"peak_reserved_bytes": 1200}
    on_gpu["profiled"]["at_peak"] |= {"bytes": 980}
    on_gpu["profiled"]["at_peak"]["parts"][-1]["bytes"] -= 20
    measured = at_peak_columns(RankReport.from_json(on_gpu))
    assert (measured["at_peak_rounding_bytes"], measured["at_peak_unmatched_bytes"]) == (20, 0)
    on_gpu["profiled"]["peak_allocated_bytes"] = 980  # a simulated step's allocator is replayed for all steps at once
    assert at_peak_columns(RankReport.from_json(on_gpu))["at_peak_unmatched_bytes"] == 20
    measured = at_peak_columns(RankReport.from_json(on_gpu | {"peak_requested_bytes": 980}))
    assert (measured["at_peak_rounding_bytes"], measured["at_peak_unmatched_bytes"]) == (20, 0)


def test_traffic_outside_the_formula_is_named() -> None:
    config = compose_config()
    layout, values = resolve_layout(config.strategy, 2), rank(1, [1.0], 1000)
    norm = values["profiled"]["communication"][0] | {"purpose": "clip_grads", "bytes_sent": 8.0}
    values["profiled"]["communication"].append(norm)
    papers = {"dp_replicate reduce": 90.0, "dp_shard gather": 0.0, "pp send": 0.0}
    padded = papers | {"dp_replicate reduce": 100.0}
    entry = {"axis": "dp_replicate", "bytes": 100.0, "formula_bytes": 90.0, "padded_bytes": 100.0}
    outside = {"clip_grads all_reduce": 8.0}
    assert bytes_by_axis(layout, RankReport.from_json(values), papers, padded) == [entry | {"outside": outside}]


def test_pipeline_idle_time_is_the_step_without_its_phases() -> None:
    config = compose_config("strategy=pp_1f1b", "strategy.layers_per_stage=[1,3]")
    layout = resolve_layout(config.strategy, 2)
    ranks = [rank(0, [10.0, 10.0, 10.0], 1000), rank(1, [10.0, 10.0, 30.0], 2000)]
    phases = [{"forward": [1.0, 2.0, 1.0], "backward": [2.0, 2.0, 2.0], "optimizer": [1.0, 1.0, 1.0]}]
    phases.append(
        {"forward": [2.0] * 3, "backward_input": [2.0] * 3, "backward_weight": [1.0] * 3, "optimizer": [1.0] * 3}
    )
    for values, seconds in zip(ranks, phases, strict=True):
        values["phase_seconds"] = seconds | {"data": [0.5] * 3}
    first, last = pipeline_entries(config, layout, reports(*ranks))
    assert (first["working_seconds"], first["idle_seconds"]) == (3.0, 5.5)
    assert (last["working_seconds"], last["idle_seconds"]) == (5.0, 3.5)  # medians over steps
    assert (first["bubble"], last["idle_share"]) == (5.5 / 3, pytest.approx(3.5 / 8.5))
    assert [(r["stages"], r["layers"], r["in_flight"]) for r in (first, last)] == [([0], [1], 1), ([1], [3], 2)]
    measured = measured_columns(config, layout, reports(*ranks))
    assert (
        measured["pipeline_bubble"] == pytest.approx(9 / 8)
        and measured["pipeline_bubble_theory"] == 1 / 8
        and measured["max_in_flight_micro_batches"] == 2
    )
