"""What runs in every rank: reads its run file, trains, and writes what it saw. It never sees Hydra."""

import dataclasses
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness import engines, job
from harness.data import Batches
from harness.errors import one_line
from harness.job import Job
from harness.layout import AXES
from harness.machine import usable_cores
from harness.masks import masks_ranks, masks_seed
from harness.measure.kernels import attention_asked_for
from harness.measure.limit import Limit
from harness.measure.memory import DeviceMemory
from harness.measure.native import load_allocator
from harness.measure.probe import Probe
from harness.measure.state import held_bytes, holdings, placed_bytes
from harness.measure.trace import Split
from harness.pulse import Pulse
from harness.records import atomic_write_json
from harness.train import train


def main(run_dir: str) -> None:
    """One rank, from its run file to its rank file. A failure is written down, then raised."""
    directory = Path(run_dir)
    rank = int(os.environ["RANK"])
    target = job.rank_file(directory, rank)
    report: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "status": "error"}
    report["cores"] = usable_cores()
    pulse = Pulse(directory, rank)
    try:
        report |= measure(job.read(directory), rank, pulse, directory) | {"status": "ok"}
    except BaseException as error:
        exhausted = out_of_memory(error)
        report |= {"status": "oom" if exhausted else "error"} | pulse.look()._asdict()
        said = exhausted or error
        report |= {"error": type(said).__name__, "reason": one_line(said), "traceback": traceback.format_exc()}
        raise
    finally:
        atomic_write_json(target, report)


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error that says memory ran out, itself or what caused it: torch's pipeline stages wrap what they raise."""
    while error is not None and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        error = error.__cause__
    return error


def measure(this: Job, rank: int, pulse: Pulse, directory: Path) -> dict[str, Any]:
    """Joins the other ranks and trains; everything this rank has to say about it, as plain values."""
    os.environ.update(this.environment)
    allocator = load_allocator(Path(this.allocator)) if this.allocator else None
    pulse("joining")
    with process_group(this) as (mesh, device), attention_asked_for():
        limit = Limit(this.config.cluster.memory_budget_bytes, device, allocator)
        memory = DeviceMemory(device, allocator, limit)
        pulse.allocated_bytes = memory.allocated_bytes
        return trained(this, rank, pulse, directory, mesh, memory)


def trained(
    this: Job, rank: int, pulse: Pulse, directory: Path, mesh: DeviceMesh, memory: DeviceMemory
) -> dict[str, Any]:
    """Builds the engine and trains. The engine is gone on return, so that nothing outlives the groups it talks over."""
    probe, device = Probe(), memory.device
    pulse("building")
    memory.reset_peak()
    memory.limit.enforce()
    engine = engines.load(this.layout.engine).build(this.config, this.layout, mesh, device, probe)
    start_peak_bytes = memory.peak_allocated_bytes()
    torch.manual_seed(masks_seed(this.config.train.seed, this.layout, rank))
    batches = Batches(this.corpus, this.config, this.layout, rank, device)
    snapshot = job.snapshot_file(directory, rank) if this.config.measure.memory_snapshot else None
    seen = train(engine, probe, batches, this.config.train, this.layout, memory, pulse, snapshot)
    pulse("finishing", this.config.train.all_steps)
    profiled = seen.profiled._asdict()
    report = (
        {key: value for key, value in vars(seen).items() if key != "memory"}
        | seen.memory._asdict()
        | {
            "last_gradients": profiled.pop("gradients"),
            "profiled": as_plain(profiled),
            "traced": seen.traced and as_plain_split(seen.traced),
            "used": dataclasses.asdict(seen.used),
            "devices": engine.devices,
            "skipped_steps": engine.skipped_steps,
            "device_name": torch.cuda.get_device_name() if this.device == "cuda" else "cpu",
            "start_peak_bytes": start_peak_bytes,
            "masks_seed": torch.initial_seed(),
            "masks_ranks": masks_ranks(engine.model),
            "parameter_bytes": held_bytes(engine, "parameters"),
            "optimizer_bytes": held_bytes(engine, "optimizer"),
            "on_host": sorted(engine.on_host),
            "placed": {
                "parameters": placed_bytes(engine, "parameters"),
                "gradients": profiled["placed_gradients"],
                "optimizer": placed_bytes(engine, "optimizer"),
            },
            "parameters": holdings(engine, "parameters"),
            "optimizer": holdings(engine, "optimizer"),
        }
    )
    engine.close()
    return report


def as_plain(profiled: dict[str, Any]) -> dict[str, Any]:
    at_peak = profiled["at_peak"]
    return profiled | {
        "at_peak": at_peak and at_peak._asdict(),
        "communication": [dataclasses.asdict(entry) for entry in profiled["communication"]],
    }


def as_plain_split(traced: Split) -> dict[str, Any]:
    return traced._asdict() | {"phases": {name: share._asdict() for name, share in traced.phases.items()}}


@contextmanager
def process_group(this: Job) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Joins the other ranks; a mesh with every axis, in the order of layout.AXES."""
    torch.set_num_threads(this.threads)
    torch.set_float32_matmul_precision("highest")  # fp32 is fp32: some containers have TF32 on
    if this.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # gloo for gradients that lie on the host and are summed there
        backend = "cpu:gloo,cuda:nccl" if this.layout.on_host else "nccl"
        dist.init_process_group(backend, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield init_device_mesh(this.device, this.layout.mesh_shape, mesh_dim_names=AXES), device
    dist.destroy_process_group()  # only after success: a failed rank must not wait for the others
