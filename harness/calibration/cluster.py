"""The cluster file of a calibrated machine: fitted rates in the place of datasheet values, and what they are from.

What one machine cannot measure, the links to others, is a datasheet's where another file describes this device, and
otherwise an assumption that the file names as such.
"""

import dataclasses
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from harness.calibration.fit import CurveError, FittedRates
from harness.calibration.points import Measurements
from harness.config.hardware import FittedHardware, HardwareConfig
from harness.hardware.machine import Machine, peak_flops, processor_name
from harness.util.files import atomic_write_text
from harness.util.text import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# Bytes per second between machines of which no datasheet is known: a network of 10 Gbit/s, and what NCCL's tuning takes
# for one step of a ring over sockets and over InfiniBand (src/graph/tuning.cc).
ASSUMED_NETWORK = 1.25e9
ASSUMED_NETWORK_EFFICIENCY = 0.8
ASSUMED_NETWORK_LATENCY = 1.4e-5


def default_name(device_name: str, ranks: int) -> str:
    """Return the name of a machine's cluster file: 8xnvidia_h100_80gb_hbm3."""
    return f"{ranks}x{re.sub(r'[^a-z0-9]+', '_', device_name.lower()).strip('_')}"


def cluster_path(folder: Path, name: str, overwrites: bool) -> Path:
    """Return the file of a new cluster. Raises UserError for a name that is none, and for one that is taken."""
    if not NAME.fullmatch(name):
        raise UserError(f"--name={name} is no name of a cluster: choose letters, digits, _, - and .")
    path = folder / f"{name}.yaml"
    if path.exists() and not overwrites:
        raise UserError(f"{path} exists already: choose another --name, or --overwrite")
    return path


def calibrated_hardware(
    machine: Machine, measured: Measurements, rates: FittedRates, datasheet: HardwareConfig | None
) -> HardwareConfig:
    """Return the hardware of the measured machine; `datasheet` is that of a file with this device, if there is one.

    Its first source is when and on what the figures were measured.
    """
    import torch

    is_cpu = machine.device == "cpu"
    shared = measured.ranks if is_cpu else 1  # a CPU's figures are those of all ranks together
    known_peak = None if is_cpu else peak_flops(machine.device_name, measured.dtype)
    peak = known_peak or max(rates.peak_flops, rates.matmul_flops)
    memory_bandwidth = datasheet.memory_bandwidth if datasheet else rates.peak_memory_bandwidth
    link = datasheet.intra_node_bandwidth if datasheet else rates.link_bandwidth or ASSUMED_NETWORK
    fitted = FittedHardware(
        matmul_efficiency=rates.matmul_flops / peak,
        attention_efficiency=rates.attention_flops / peak,
        cudnn_attention_efficiency=rates.attention_flops / peak,  # by the kernel that runs take
        attention_backward_ratio=rates.attention_backward_flops / rates.attention_flops,
        memory_efficiency=rates.memory_bytes / memory_bandwidth,
        kernel_seconds=rates.kernel_seconds,
        launch_seconds=rates.launch_seconds,
        intra_node_efficiency=1.0 if rates.link_bandwidth is None else rates.link_bandwidth / link,
        intra_node_latency=ASSUMED_NETWORK_LATENCY if rates.link_latency is None else rates.link_latency,
        inter_node_efficiency=datasheet.fitted.inter_node_efficiency if datasheet else ASSUMED_NETWORK_EFFICIENCY,
        inter_node_latency=datasheet.fitted.inter_node_latency
        if datasheet
        else max(ASSUMED_NETWORK_LATENCY, rates.link_latency or 0.0),
        overlap_slowdown=1.0 if rates.overlap_slowdown is None else rates.overlap_slowdown,
    )
    source = f"measured by harness calibrate on {datetime.now(UTC).date().isoformat()}: torch {torch.__version__}"
    device = f"{processor_name() or 'a CPU'}, {machine.cores} cores" if is_cpu else machine.device_name
    return HardwareConfig(
        device_name=machine.device_name,
        memory=machine.device_bytes or psutil.virtual_memory().total,
        memory_bandwidth=_rounded(memory_bandwidth * shared),
        intra_node_bandwidth=_rounded(link),
        inter_node_bandwidth=datasheet.inter_node_bandwidth if datasheet else ASSUMED_NETWORK,
        sources=(f"{source}, {device}, {measured.ranks} ranks", *(datasheet.sources if datasheet else ())),
        fitted=FittedHardware(**{name: _rounded(value) for name, value in dataclasses.asdict(fitted).items()}),
        fitted_to="",
        datasheet_only=False,
        host_bandwidth=rates.host_bandwidth or (datasheet.host_bandwidth if datasheet else None),
        price_per_device_hour=datasheet.price_per_device_hour if datasheet else None,
        peak_flops=None if known_peak else _rounded(peak * shared),
        peak_flops_dtype=None if known_peak else measured.dtype,
        calibrated=True,
        processor=processor_name() if is_cpu else None,
        cores=machine.cores if is_cpu else None,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def assumptions(rates: FittedRates, datasheet: HardwareConfig | None) -> str:
    """Return what one machine could not measure, and where its figures are from, in one sentence."""
    links = "inter_node_bandwidth, inter_node_efficiency and inter_node_latency, the links to others"
    source = "the file that describes this device" if datasheet else "an assumed network of 10 Gbit/s: set them"
    text = f"One machine cannot measure {links}; they are of {source}."
    if rates.link_bandwidth is None:
        text += " A single rank measures no links in the machine either: intra_node_* and overlap_slowdown are assumed."
    return text


def fitted_to(measured: Measurements, errors: list[CurveError]) -> str:
    """Return the measurements behind the fitted parameters, the range of their sizes and the errors of the curves."""
    curves = "; ".join(
        f"{e.name}, {e.points} points of {e.sizes}, median error {e.median_error:.0%}, largest {e.largest_error:.0%}"
        for e in errors
    )
    return f"medians of repetitions on {measured.ranks} ranks at once: {curves}"


def write_cluster(path: Path, name: str, ranks: int, hardware: HardwareConfig) -> None:
    """Write a cluster file in the format of conf/cluster."""
    values: dict[str, Any] = dataclasses.asdict(hardware)
    values["sources"] = list(hardware.sources)
    fitted, notes = values.pop("fitted"), values.pop("notes")
    optional = {key: value for key, value in values.items() if value is not None}
    cluster = {
        "name": name,
        "nodes": 1,
        "gpus_per_node": ranks,
        "device": "cpu" if hardware.is_cpu else "cuda",
        "hardware": {**optional, "notes": notes, "fitted": fitted},
    }
    text = yaml.safe_dump(cluster, sort_keys=False, width=4096, allow_unicode=True)
    atomic_write_text(path, f"# This machine, {hardware.sources[0]}.\n{text}")
