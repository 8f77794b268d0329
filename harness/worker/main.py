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

from harness.engines.base import load_engine
from harness.hardware.machine import usable_cores
from harness.layout.layout import AXES
from harness.measure.kernels import attention_backend_priority
from harness.measure.memory import DeviceMemory
from harness.measure.memory_limit import MemoryLimit
from harness.measure.native_allocator import load_allocator
from harness.measure.rank_state import bytes_by_device, held_bytes, held_shards
from harness.measure.time_breakdown import TimeBreakdown
from harness.models.dropout_rng import dropout_rng_ranks, dropout_seed
from harness.probe import Probe
from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import RunFolder
from harness.records.run_spec import RunSpec, read_run_spec
from harness.util.files import atomic_write_json
from harness.util.text import one_line
from harness.worker.batches import Batches
from harness.worker.train_loop import train


def main(run_dir: str) -> None:
    """One rank, from its run file to its rank file. A failure is written down, then raised."""
    directory = Path(run_dir)
    rank = int(os.environ["RANK"])
    target = RunFolder(directory).rank_report(rank)
    report: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "status": "error"}
    report["cores"] = usable_cores()
    pulse = HeartbeatWriter(directory, rank)
    try:
        report |= run_rank(read_run_spec(directory), rank, pulse, directory) | {"status": "ok"}
    except BaseException as error:
        exhausted = out_of_memory(error)
        report |= {"status": "oom" if exhausted else "error"} | pulse.sample()._asdict()
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


def run_rank(this: RunSpec, rank: int, pulse: HeartbeatWriter, directory: Path) -> dict[str, Any]:
    """Joins the other ranks and trains; everything this rank has to say about it, as plain values."""
    os.environ.update(this.environment)
    allocator = load_allocator(Path(this.allocator)) if this.allocator else None
    pulse("joining")
    with process_group(this) as (mesh, device), attention_backend_priority():
        limit = MemoryLimit(this.config.cluster.memory_budget_bytes, device, allocator)
        memory = DeviceMemory(device, allocator, limit)
        pulse.allocated_bytes = memory.allocated_bytes
        return build_and_train(this, rank, pulse, directory, mesh, memory)


def build_and_train(
    this: RunSpec, rank: int, pulse: HeartbeatWriter, directory: Path, mesh: DeviceMesh, memory: DeviceMemory
) -> dict[str, Any]:
    """Builds the engine and trains. The engine is gone on return, so that nothing outlives the groups it talks over."""
    probe, device = Probe(), memory.device
    pulse("building")
    memory.reset_peak()
    memory.limit.enforce()
    engine = load_engine(this.layout.engine).build(this.config, this.layout, mesh, device, probe)
    start_peak_bytes = memory.peak_allocated_bytes()
    torch.manual_seed(dropout_seed(this.config.train.seed, this.layout, rank))
    batches = Batches(this.corpus, this.config, this.layout, rank, device)
    snapshot = RunFolder(directory).memory_snapshot(rank) if this.config.measure.memory_snapshot else None
    seen = train(engine, probe, batches, this.config.train, this.layout, memory, pulse, snapshot)
    pulse("finishing", this.config.train.total_steps)
    profiled = seen.profiled._asdict()
    report = (
        {key: value for key, value in vars(seen).items() if key != "memory"}
        | seen.memory._asdict()
        | {
            "last_gradients": profiled.pop("gradients"),
            "profiled": to_plain(profiled),
            "traced": seen.traced and breakdown_to_plain(seen.traced),
            "used": dataclasses.asdict(seen.used),
            "devices": engine.devices,
            "skipped_steps": engine.skipped_steps,
            "device_name": torch.cuda.get_device_name() if this.device == "cuda" else "cpu",
            "start_peak_bytes": start_peak_bytes,
            "masks_seed": torch.initial_seed(),
            "masks_ranks": dropout_rng_ranks(engine.model),
            "parameter_bytes": held_bytes(engine, "parameters"),
            "optimizer_bytes": held_bytes(engine, "optimizer"),
            "on_host": sorted(engine.host_state),
            "placed": {
                "parameters": bytes_by_device(engine, "parameters"),
                "gradients": profiled["placed_gradients"],
                "optimizer": bytes_by_device(engine, "optimizer"),
            },
            "parameters": held_shards(engine, "parameters"),
            "optimizer": held_shards(engine, "optimizer"),
        }
    )
    engine.close()
    return report


def to_plain(profiled: dict[str, Any]) -> dict[str, Any]:
    at_peak = profiled["at_peak"]
    return profiled | {
        "at_peak": at_peak and at_peak._asdict(),
        "communication": [dataclasses.asdict(entry) for entry in profiled["communication"]],
    }


def breakdown_to_plain(traced: TimeBreakdown) -> dict[str, Any]:
    return traced._asdict() | {"phases": {name: share._asdict() for name, share in traced.phases.items()}}


@contextmanager
def process_group(this: RunSpec) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Joins the other ranks; a mesh with every axis, in the order of layout.AXES."""
    torch.set_num_threads(this.threads)
    torch.set_float32_matmul_precision("highest")  # fp32 is fp32: some containers have TF32 on
    if this.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # gloo for gradients that lie on the host and are summed there
        backend = "cpu:gloo,cuda:nccl" if this.layout.offloaded_state else "nccl"
        dist.init_process_group(backend, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield init_device_mesh(this.device, this.layout.mesh_shape, mesh_dim_names=AXES), device
    dist.destroy_process_group()  # only after success: a failed rank must not wait for the others
