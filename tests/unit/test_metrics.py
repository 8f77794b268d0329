"""A row's figures from two hand-made ranks that differ in everything: no rank is left out, and no unit changes."""

from typing import Any

import pytest

from harness.cost_model.parts import STEP_PARTS
from harness.layout.layout import resolve_layout
from harness.metrics.columns import bytes_by_axis, measured_columns
from harness.metrics.memory import at_peak_columns, memory_columns
from harness.metrics.step_time import pipeline_entries
from harness.records.rank_report import RankReport
from tests.support.commands import compose_config, compose_layout

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


def check(measured: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check some columns of a row; a figure that is expected as None is unknown."""
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=1e-9)


def check_parts(measured: dict[str, Any]) -> None:
    """Check that the parts of a step add up to it."""
    assert sum(measured[name] or 0 for name in STEP_PARTS) == pytest.approx(measured["step_seconds"])


def test_figures_are_the_whole_worlds() -> None:
    """A step is the slowest rank's of each step: 3, 2 and 9; their median counts."""
    ranks = [rank(0, [1.0, 2.0, 9.0], 1000), rank(1, [3.0, 1.0, 1.0], 1500)]
    measured = measured_on(*ranks, overrides=SIZES)
    times = {"step_seconds": 3.0, "step_seconds_p95": 3 + 0.9 * 6, "step_seconds_iqr_ratio": None}
    speeds = {"tokens_per_second": 8 * 32 / 3.0, "tokens_per_second_per_device": 8 * 32 / 3.0 / 2}
    peaks = {"peak_allocated_bytes": 1500, "peak_rank": 1, "peak_reserved_bytes": None, "peak_rss_bytes": 7001}
    sizes = {"parameter_bytes": 101, "optimizer_bytes": 200, "gradient_bytes": 301, "activation_bytes": 400}
    sizes |= {"offloaded_bytes": 251, "communication_bytes": 100, "at_peak_temporary_bytes": 850}
    used = {"executed_flops": 2 * 10**9, "cpu_seconds": 7 / 3, "joules_per_token": 20 / (3 * 8 * 32)}
    used |= {"loss_first": 4.5, "loss_last": 2.5, "offloaded_activation_bytes": None}
    peak = 2 * 67e12  # of two devices in fp32
    used |= {"mfu": measured["model_flops"] / 3.0 / peak, "hfu": 2e9 / 3.0 / peak}
    check(measured, times | speeds | peaks | sizes | used)
    assert measured["peak_phase"] == "backward"
    ranks[1]["device_name"] = "NVIDIA H201"
    unknown = measured_on(*ranks, overrides=SIZES)
    assert unknown["mfu"] is None and unknown["model_flops_per_second_per_device"] is not None


def test_figures_that_the_profiler_missed_are_unknown_and_not_zero() -> None:
    measured = measured_on(*(rank(number, [1.0, 2.0, 9.0], 1000) | {"traced": None} for number in range(2)))
    names = ("exposed_communication", "exposed_copy", "idle", "overlapped_communication")
    check(measured, dict.fromkeys((f"{name}_seconds" for name in names), None))
    check_parts(measured)


@pytest.mark.parametrize("delay", [0.0, 3.0])
def test_a_gpu_waits_as_long_as_it_is_not_busy(delay: float) -> None:
    """The profiler delays the host, so that a GPU waits longer in traced steps, but is busy for as long."""
    values = rank(0, [1.0], 1000)
    for share in values["traced"]["phases"].values():  # two steps are traced
        share["seconds"], share["exposed_seconds"] = 1.4 * share["seconds"] + delay, 1.4 * share["exposed_seconds"]
        share["waiting_seconds"] = delay
    values["traced"] |= {"seconds": 1.4 + 6 * delay, "overlapped_seconds": 0.28}
    measured = measured_on(values)
    exposed = {"exposed_communication_seconds": 0.07, "overlapped_communication_seconds": 0.14}
    check(measured, {"idle_seconds": 0.3} | exposed)
    check_parts(measured)


def test_a_cpu_that_waits_inside_its_phases_prepares_messages() -> None:
    values = rank(0, [1.0], 1000, "cpu")
    values["traced"]["phases"]["forward"]["waiting_seconds"] = 0.15  # half of it
    check(measured_on(values), {"forward_seconds": 0.3})


def test_the_kernels_of_several_devices_divide_no_step() -> None:
    """A device waits while others compute, and a trace does not tell whose kernels are whose."""
    unknown = dict.fromkeys((f"{name}_communication_seconds" for name in ("exposed", "overlapped")), None)
    check(measured_on(rank(0, [1.0], 1000) | {"devices": 4}), {"idle_seconds": None, "forward_seconds": 0.3} | unknown)


def test_a_gpu_that_was_busy_for_longer_never_waits() -> None:
    values = rank(0, [0.25], 1000)
    values["traced"]["phases"]["rest"]["waiting_seconds"] = 0.0
    measured = measured_on(values)
    check(measured, {"idle_seconds": 0.0, "exposed_communication_seconds": 0.25 * 0.1, "step_seconds": 0.25})
    check_parts(measured)


@pytest.mark.parametrize("fullest", range(3))
def test_memory_is_the_fullest_ranks_wherever_it_is(fullest: int) -> None:
    """The fullest rank is neither the first, which is often reported, nor the last."""
    ranks = [rank(number, [1.0], 1500 if number == fullest else 1000) for number in range(3)]
    expected = {"peak_allocated_bytes": 1500, "peak_rank": fullest, "at_peak_temporary_bytes": 850}
    check(memory_columns(reports(*ranks)), expected)


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Phases are by the clock, of the slowest rank in the median step, each divided as the traced phases were."""
    ranks = [rank(0, [1.0, 2.0, 9.0], 1000, "cpu"), rank(1, [3.0, 1.0, 1.0], 1500, "cpu")]
    ranks[1]["phase_seconds"]["forward"][0] = 1.2  # 0.4 of the step
    expected = {"data": 0.15, "forward": 1.2, "backward": 0.9, "optimizer": 0.45, "exposed_communication": 0.3}
    expected |= {"idle": 0.0, "overlapped_communication": 0.6}  # all but the phases is 0 here
    measured = measured_on(*ranks)
    check(measured, {f"{name}_seconds": seconds for name, seconds in expected.items()})
    even = measured_on(rank(0, [1.0, 2.0, 4.0, 8.0], 1000, "cpu"))
    rest = {"idle_seconds": 0.08 * 3, "other_seconds": 0.02 * 3, "step_seconds_iqr_ratio": (5 - 1.75) / 3}
    check(even, {"step_seconds": 3.0} | rest)
    check_parts(measured)
    check_parts(even)


def test_waiting_of_a_pipeline_is_idle() -> None:
    values = rank(0, [10.0], 1000, "cpu")
    values["traced"]["phases"]["norm"]["exposed_seconds"] = 0.05  # all of it: there the stages meet
    measured = measured_on(values, rank(1, [5.0], 900), overrides="strategy=pp_1f1b")
    check(measured, {"idle_seconds": 0.5 + 0.8, "other_seconds": 0.2, "exposed_communication_seconds": 1.0})


UNEXPLAINED: list[tuple[dict[str, int | None], dict[str, int]]] = [
    # What is less in the profiled step, by where it stands, with what is requested; the columns of the rest.
    ({"parts": 40}, {"unmatched": 40}),
    ({"parts": 400}, {"unmatched": 400}),
    ({"profiled": 80, "at_peak": 80, "parts": 80, "reserved": 1200}, {}),
    ({"profiled": 40, "at_peak": 40, "parts": 40, "reserved": 1200}, {"unmatched": 40}),
    ({"at_peak": -1, "reserved": 1200}, {}),  # blocks that the log lacks are no rounding
    ({"at_peak": 300, "reserved": 1200}, {}),
    ({"at_peak": 20, "parts": 20, "reserved": 1200}, {"rounding": 20, "unmatched": 0}),
    # A simulated step's allocator is replayed for all steps at once.
    ({"profiled": 20, "at_peak": 20, "parts": 20, "reserved": 1200}, {"unmatched": 20}),
    (
        {"profiled": 20, "at_peak": 20, "parts": 20, "reserved": 1200, "requested": 980},
        {"rounding": 20, "unmatched": 0},
    ),
]


@pytest.mark.parametrize(("less", "expected"), UNEXPLAINED)
def test_a_profiled_step_unlike_the_timed_ones_explains_what_it_can(
    less: dict[str, int], expected: dict[str, int]
) -> None:
    values = rank(0, [1.0], 1000) | {"peak_reserved_bytes": less.get("reserved")}
    values |= {"peak_requested_bytes": less["requested"]} if "requested" in less else {}
    profiled, at_peak = values["profiled"], values["profiled"]["at_peak"]
    for place, key in (("profiled", "peak_allocated_bytes"), ("at_peak", "bytes"), ("parts", "bytes")):
        {"profiled": profiled, "at_peak": at_peak, "parts": at_peak["parts"][-1]}[place][key] -= less.get(place, 0)
    columns = at_peak_columns(RankReport.from_json(values))
    assert bool(columns) == bool(expected)
    check(columns, {f"at_peak_{name}_bytes": size for name, size in expected.items()})


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
    config, layout = compose_layout(2, "strategy=pp_1f1b", "strategy.layers_per_stage=[1,3]")
    ranks = [rank(0, [10.0, 10.0, 10.0], 1000), rank(1, [10.0, 10.0, 30.0], 2000)]
    phases = [{"forward": [1.0, 2.0, 1.0], "backward": [2.0, 2.0, 2.0], "optimizer": [1.0, 1.0, 1.0]}]
    phases.append(
        {"forward": [2.0] * 3, "backward_input": [2.0] * 3, "backward_weight": [1.0] * 3, "optimizer": [1.0] * 3}
    )
    for values, seconds in zip(ranks, phases, strict=True):
        values["phase_seconds"] = seconds | {"data": [0.5] * 3}
    first, last = pipeline_entries(config, layout, reports(*ranks))
    check(first, {"working_seconds": 3.0, "idle_seconds": 5.5, "bubble": 5.5 / 3, "in_flight": 1})
    check(last, {"working_seconds": 5.0, "idle_seconds": 3.5, "idle_share": 3.5 / 8.5, "in_flight": 2})  # medians
    assert [(r["stages"], r["layers"]) for r in (first, last)] == [([0], [1]), ([1], [3])]
    measured = measured_columns(config, layout, reports(*ranks))
    expected = {"pipeline_bubble": 9 / 8, "pipeline_bubble_theory": 1 / 8, "max_in_flight_micro_batches": 2}
    check(measured, expected)
