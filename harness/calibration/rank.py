"""The code of every rank of a calibration: it joins the others, measures, and the first rank writes what it saw."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.calibration.kernels import (
    QUICK_SIZES,
    SIZES,
    Stopwatch,
    attention_points,
    collective_points,
    host_copy_points,
    launch_points,
    matmul_points,
    memory_points,
    overlap_points,
)
from harness.calibration.points import RESULT_FILE, SPEC_FILE, Measurements
from harness.config.schema import Device
from harness.util.files import atomic_write_json


@dataclass(frozen=True)
class Effort:
    """How long a calibration measures."""

    point_seconds: float  # for the samples of a kernel or of a message
    longest_message_seconds: float  # no longer message follows


FULL, QUICK = Effort(0.25, 0.1), Effort(0.03, 0.02)


def main(run_dir: str) -> None:
    """Measure as one rank. The file SPEC_FILE in the folder has the device, its dtype and the threads."""
    spec = json.loads((Path(run_dir) / SPEC_FILE).read_text())
    device: Device = spec["device"]
    torch.set_num_threads(spec["threads"])
    torch.set_float32_matmul_precision("highest")
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    measurements = measure(place, getattr(torch, spec["dtype"]), spec["quick"])
    if dist.get_rank() == 0:
        atomic_write_json(Path(run_dir) / RESULT_FILE, dataclasses.asdict(measurements))
    dist.barrier()
    dist.destroy_process_group()


def measure(device: torch.device, dtype: torch.dtype, quick: bool) -> Measurements:
    """Return everything that the ranks measure together."""
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    sizes, effort = (QUICK_SIZES, QUICK) if quick else (SIZES, FULL)
    watch, ranks = Stopwatch(device, effort.point_seconds), dist.get_world_size()
    chosen = sizes[kind]
    return Measurements(
        ranks=ranks,
        dtype=str(dtype).removeprefix("torch."),
        width=dtype.itemsize,
        matmuls=tuple(matmul_points(watch, chosen.sides, dtype)),
        attentions=tuple(attention_points(watch, chosen.attentions, dtype)),
        memories=tuple(memory_points(watch, chosen.memory_bytes, chosen.cache_bytes)),
        launches=tuple(launch_points(watch)),
        collectives=tuple(collective_points(watch, ranks, effort.longest_message_seconds)),
        host_copies=tuple(host_copy_points(watch, chosen.memory_bytes[:4])) if kind == "cuda" else (),
        overlaps=tuple(overlap_points(watch, chosen.sides[-2], dtype)) if ranks > 1 else (),
    )
