"""The fit of a calibration: points of a known machine give back its parameters, and what cannot be told is refused."""

import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import yaml

from harness.calibration import cluster
from harness.calibration.cluster import (
    assumptions,
    calibrated_hardware,
    cluster_path,
    default_name,
    write_cluster,
)
from harness.calibration.fit import curve_errors, fit_links, fit_rates, fit_terms, predicted_seconds
from harness.calibration.kernels import _growing_messages
from harness.calibration.points import Collective, Measurements, Point
from harness.config.from_dict import from_dict
from harness.config.hardware import FittedHardware, HardwareConfig
from harness.config.schema import ClusterConfig
from harness.config.stack import StackTiming, load_stack
from harness.cost_model.timing.kernels import fused_attention_flops, kernel_rates, rank_hardware
from harness.cost_model.timing.layer_time import GPU_SHARE
from harness.cost_model.timing.step_time import estimate_step_time
from harness.hardware.machine import Machine, described_devices
from harness.util.text import UserError
from tests.support.campaigns import read_table
from tests.support.commands import ROOT, compose_config, compose_layout, widths_of
from tests.support.planned import HARDWARE, planned

RANKS = 2

TRUTH = dataclasses.replace(
    HARDWARE,
    device_name="cpu",
    memory=2**34,
    memory_bandwidth=4e10,
    intra_node_bandwidth=2e9,
    inter_node_bandwidth=1.25e9,
    host_bandwidth=None,
    fitted=FittedHardware(0.8, 0.3, 0.3, 0.7, 0.9, 3e-6, 5e-6, 0.75, 2e-4, 0.8, 2e-4, 0.4),
    peak_flops=2e11,
    peak_flops_dtype="float32",
    processor="A processor",
    cores=2,
)

MACHINE = Machine("cpu", "cpu", 1, RANKS, 0, (2**33,), 2)


def measured_on(hardware: HardwareConfig, longest: int = 2**26, disturbed: float = 0.0) -> Measurements:
    """Return the points that a machine with these parameters would measure, a share of them disturbed."""
    rates, draw = kernel_rates(rank_hardware(hardware, RANKS), "float32"), random.Random(0)
    blank = [
        *(Point("product", (m, n, m), 2.0 * m * n * m, 1.0) for m in (2**p for p in range(6, 12)) for n in (m, 4 * m)),
        *(
            Point(curve, (1, 8, tokens, 64), factor * fused_attention_flops(tokens, tokens, 8, 64, 0.5), 1.0)
            for tokens in (128, 256, 512, 1024, 2048)
            for curve, factor in (("forward", 1.0), ("backward", 2.5))
        ),
        *(Point("memory in caches", (), size, 1.0) for size in (2**18, 2**20)),
        *(Point("memory", (), size, 1.0) for size in (2**25, 2**26, 2**27, 2**28)),
        *(
            Point(operation, (RANKS,), 2**power, 1.0)
            for operation in get_args(Collective)
            for power in range(12, 27, 2)
            if 2**power <= longest
        ),
    ]
    measured = Measurements(RANKS, "float32", 4, tuple(blank), hardware.fitted.overlap_slowdown)

    def timed(point: Point) -> Point:
        seconds = predicted_seconds(point, measured, hardware)
        if point.curve == "forward":
            seconds = point.work / rates.attention_flops + rates.kernel_seconds
        elif point.curve == "backward":
            seconds = point.work / rates.attention_backward_flops + 2 * rates.kernel_seconds
        elif point.curve == "memory in caches":
            seconds /= 4
        return dataclasses.replace(point, seconds=seconds * (5.0 if draw.random() < disturbed else 1.0))

    launch = Point("launch", (), 40, 40 * hardware.fitted.launch_seconds)
    return dataclasses.replace(measured, points=(*map(timed, blank), launch))


def rates_of(hardware: HardwareConfig) -> dict[str, float]:
    """Return what the fitted parameters stand for, however they are split between a peak and its share."""
    one, fitted = rank_hardware(hardware, RANKS), hardware.fitted
    rates = kernel_rates(one, "float32")
    return dataclasses.asdict(rates) | {
        "launch": fitted.launch_seconds,
        "link": hardware.intra_node_bandwidth * fitted.intra_node_efficiency,
        "latency": fitted.intra_node_latency,
        "overlap": fitted.overlap_slowdown,
    }


@pytest.mark.parametrize(("disturbed", "tolerance"), [(0.0, 1e-3), (0.15, 0.1)])
def test_points_of_a_known_machine_give_back_its_parameters(disturbed: float, tolerance: float) -> None:
    measured = measured_on(TRUTH, disturbed=disturbed)
    hardware = calibrated_hardware(MACHINE, measured, fit_rates(measured), None)
    assert rates_of(hardware) == pytest.approx(rates_of(TRUTH), rel=tolerance, abs=1e-6)
    errors = {curve.name: curve.median_error for curve in curve_errors(measured, hardware)}
    assert errors.pop("memory in caches, not fitted") > 1
    assert max(errors.values()) < max(tolerance, 0.002)


def test_a_gpu_s_products_are_fitted_where_the_device_decides() -> None:
    """Of one H200's, small ones take what the host needs for a launch, and large ones move their bytes meanwhile."""
    rows = read_table(ROOT / "results" / "first_gpu" / "kernels.csv")
    sizes = [tuple(map(int, re.findall(r"\d+", row["sizes"]))) for row in rows]
    columns = (
        [row["curve"] for row in rows],
        sizes,
        *([float(row[key]) for row in rows] for key in ("work", "seconds")),
    )
    measured = Measurements(1, "bfloat16", 0, tuple(map(Point, *columns)))
    machine = dataclasses.replace(MACHINE, device="cuda", device_name="NVIDIA H200")
    datasheet = described_devices()["NVIDIA H200"]
    hardware = calibrated_hardware(machine, measured, fit_rates(measured), datasheet)
    products = measured.of("product")
    assert [min(point.sizes) for point in products] == [2048, 2048, 4096, 4096, 8192, 8192]
    assert all(abs(predicted_seconds(p, measured, hardware) / p.seconds - 1) < 0.06 for p in products)
    rates = kernel_rates(hardware, "bfloat16")
    assert 0.97 < rates.matmul_flops / max(point.rate for point in products) <= 1.0
    assert 1.0 < rates.product_seconds(*products[-1].sizes, 2) / products[-1].seconds < 1.06, "a plan adds the bytes"


def test_messages_too_short_for_a_bandwidth_are_refused() -> None:
    """With 2e-4 s and 1.5e9 bytes a second, half of the time of 300,000 bytes is latency."""
    whole = measured_on(TRUTH)
    assert fit_links(whole)[0] == pytest.approx(1.5e9, rel=1e-6)
    with pytest.raises(UserError, match=r"cannot fit a bandwidth, as messages of 65536 bytes take latency alone"):
        fit_rates(measured_on(TRUTH, longest=2**16))


def growing_messages(seconds: Callable[[int], float], most_seconds: float) -> list[Point]:
    """Return what is measured of messages that take so many seconds by their bytes, which none of them sends."""
    sizes = iter(2**12 * 4**index for index in range(30))
    watch: Any = SimpleNamespace(device=torch.device("cpu"), median_seconds=lambda *_: seconds(next(sizes)))
    group: Any = None
    return list(_growing_messages(watch, "all_gather", 2, group, most_seconds))


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-5, 1e9), (1e-3, 1e9), (1e-4, 2e10)])
def test_messages_grow_until_bytes_decide_their_time(latency: float, bandwidth: float) -> None:
    points = growing_messages(lambda size: latency + size / bandwidth, most_seconds=0.1)
    assert points[-1].work / bandwidth > 0.5 * points[-1].seconds
    assert [p.work for p in points] == [2**12 * 4**index for index in range(len(points))]


def test_disturbed_short_messages_do_not_end_the_measurement() -> None:
    """Ones that take longer than the longest may, and look as if their bytes decided the time."""
    points = growing_messages(
        lambda size: 1e-4 + size / 1e9 + (size / 2**12 if size < 2**19 else 0.0), most_seconds=0.02
    )
    assert points[-1].work >= 2**22


def test_no_coefficient_is_negative() -> None:
    """Points that fall with their size have no rate; the start alone is fitted."""
    points = [Point("memory", (), size, 4.0 - size) for size in (1, 2, 3)]
    assert fit_terms([(1.0, point.work) for point in points], points)[1] == 0.0


def test_the_file_has_the_format_of_clusters_and_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "processor_name", lambda: "A processor")
    measured = measured_on(TRUTH)
    hardware = calibrated_hardware(MACHINE, measured, fit_rates(measured), None)
    path = cluster_path(tmp_path, default_name("cpu", RANKS), overwrites=False)
    write_cluster(path, path.stem, RANKS, hardware)
    written: ClusterConfig = from_dict(ClusterConfig, yaml.safe_load(path.read_text()))
    assert (path.name, written.name, written.gpus_per_node) == ("2xcpu.yaml", "2xcpu", RANKS)
    assert written.hardware == hardware
    assert hardware.calibrated and not hardware.datasheet_only
    (source,) = hardware.sources
    assert re.search(r" on \d{4}-\d\d-\d\d: torch \d\S+, A processor, 2 cores, 2 ranks$", source)
    with pytest.raises(UserError, match=r"2xcpu.yaml exists already: choose another --name, or --overwrite"):
        cluster_path(tmp_path, "2xcpu", overwrites=False)
    assert cluster_path(tmp_path, "2xcpu", overwrites=True) == path
    with pytest.raises(UserError, match=r"--name=\.\./x is no name of a cluster"):
        cluster_path(tmp_path, "../x", overwrites=False)


H100 = "NVIDIA H100 80GB HBM3"


def test_datasheets_have_what_one_machine_cannot_measure() -> None:
    """Links to other machines are those of the file that describes the device; without one they are assumptions."""
    datasheet = described_devices()[H100]
    machine = dataclasses.replace(MACHINE, device="cuda", device_name=H100)
    measured = dataclasses.replace(measured_on(TRUTH), dtype="bfloat16")
    rates = fit_rates(measured)
    known = calibrated_hardware(machine, measured, rates, datasheet)
    others = (known.inter_node_bandwidth, known.fitted.inter_node_efficiency, known.peak_flops, known.processor)
    assert others == (datasheet.inter_node_bandwidth, datasheet.fitted.inter_node_efficiency, None, None)
    assert known.memory_bandwidth * known.fitted.memory_efficiency == pytest.approx(rates.memory_bytes, rel=1e-3)
    assert "the file that describes this device" in assumptions(rates, datasheet)
    kernels = tuple(point for point in measured.points if point.curve not in get_args(Collective))
    single = dataclasses.replace(measured, points=kernels, overlap_slowdown=None)
    alone = fit_rates(single)
    assert alone.link_bandwidth is None and "intra_node_* and overlap_slowdown are assumed" in assumptions(alone, None)
    unknown = calibrated_hardware(dataclasses.replace(machine, device_name="X1"), single, alone, None)
    assert unknown.peak_flops == pytest.approx(max(rates.peak_flops, rates.matmul_flops), rel=1e-3)
    assert unknown.peak_flops_dtype == "bfloat16"


FAULTS = {  # the curve, and by what its work and its seconds are multiplied
    "an all-reduce timed as one pass": ("all_reduce", 1.0, 0.5),
    "a copy counted once": ("memory", 0.5, 1.0),
    "operations counted once": ("product", 1.0, 2.0),
}


@pytest.mark.parametrize(("curve", "work", "seconds"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_a_measurement_moves_the_parameters(curve: str, work: float, seconds: float) -> None:
    measured = measured_on(TRUTH)
    points = tuple(
        dataclasses.replace(p, work=work * p.work, seconds=seconds * p.seconds) if p.curve == curve else p
        for p in measured.points
    )
    broken = dataclasses.replace(measured, points=points)
    hardware = calibrated_hardware(MACHINE, broken, fit_rates(broken), None)
    off = [
        abs(value / wanted - 1)
        for value, wanted in zip(rates_of(hardware).values(), rates_of(TRUTH).values(), strict=True)
        if wanted > 1e-4
    ]
    curves = [curve for curve in curve_errors(broken, hardware) if curve.name != "memory in caches, not fitted"]
    assert max(*off, *(curve.largest_error for curve in curves)) > 0.2


def step_seconds(strategy: str, hardware: HardwareConfig, timing: StackTiming) -> float:
    """Return the predicted step of a tiny model on two ranks."""
    words = ("model=tiny", "world_size=2", "data=synthetic", "precision=fp32")
    config, layout = compose_layout(RANKS, f"strategy={strategy}", *words)
    widths = widths_of(config, layout)
    return estimate_step_time(config, layout, hardware, timing, widths, RANKS).step_seconds


def test_the_host_s_work_counts() -> None:
    """On a CPU FSDP2's and DeepSpeed's hooks and DTensor take longer than a tiny model's kernels."""
    timing = load_stack("harness").timing
    launches = [f"{name}_launches" for name in ("layer_gather", "parameter_gather", "parameter_reduce")]
    launches += ["divided_layer_launches", "micro_batch_launches"]
    without = dataclasses.replace(timing, **dict.fromkeys(launches, 0))
    names = ("ddp", "fsdp_full_shard", "tp", "zero3")
    ddp, fsdp, tp, zero3 = (step_seconds(name, TRUTH, timing) for name in names)
    assert ddp < fsdp < tp and fsdp < zero3
    layers, micro_batches = compose_config("model=tiny").model.num_hidden_layers, 4
    launched = 3 * timing.layer_gather_launches * layers * micro_batches + timing.micro_batch_launches * micro_batches
    hooks = launched * TRUTH.fitted.launch_seconds
    assert fsdp - step_seconds("fsdp_full_shard", TRUTH, without) == pytest.approx(hooks)
    h100 = described_devices()[H100]
    ddp, fsdp, tp, zero3 = (step_seconds(name, h100, timing) for name in names)
    assert ddp < fsdp < min(tp, zero3), "a tiny model waits for the host of a GPU, too"
    launched = GPU_SHARE * 3 * timing.layer_gather_launches * layers * micro_batches
    hooks = launched * h100.fitted.launch_seconds
    assert fsdp - step_seconds("fsdp_full_shard", h100, without) == pytest.approx(hooks)
    for name, times in (("zero1", 1), ("zero2", micro_batches)):  # that a step reduces a parameter's gradient
        hooks = times * 9 * layers * timing.parameter_reduce_launches * h100.fitted.launch_seconds
        assert step_seconds(name, h100, timing) - step_seconds(name, h100, without) == pytest.approx(hooks)


MEASURED = read_table(ROOT / "results" / "first_gpu" / "speed.csv")  # steps of a single rank
CLUSTERS = {"NVIDIA H200": "8xh200", H100: "8xh100"}


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{CLUSTERS[row['device']]}-{row['strategy']}-{row['model']}")
def test_what_one_gpu_took_lies_in_the_interval_of_its_plan(row: dict[str, str]) -> None:
    """The host decides where a micro-batch is one sequence of 1,024 tokens, and kernels do where it is more."""
    keys = ("compile", "micro_batch", "seq_len", "global_batch")
    words = [f"{key}={row[key]}" for key in ("strategy", "model", "checkpointing", "world_size")]
    words += [f"train.{key}={row[key]}" for key in keys]
    (prediction,) = planned(*words, f"cluster={CLUSTERS[row['device']]}", "precision=bf16_mixed").predictions
    low, high = prediction.step_interval
    measured = float(row["step_seconds"])
    assert low < measured < high
    assert 0.8 < measured / prediction.step_seconds < 1.25


def test_ranks_on_a_cpu_share_its_cores_and_take_turns() -> None:
    one, four = rank_hardware(TRUTH, 1), rank_hardware(TRUTH, 4)
    assert (one.peak_flops, four.peak_flops) == (2e11, 5e10)
    assert four.memory_bandwidth == 1e10
    assert (one.fitted.launch_seconds, four.fitted.launch_seconds) == (5e-6, 1e-5)
    h100 = described_devices()[H100]
    assert rank_hardware(h100, 8) == h100
