"""What a checkpoint costs, and the evidence that training goes on from it as if it had never been interrupted.

The state is saved behind the last step. The engine that trained then makes one more step, and is released. A new engine
with the initial weights loads the state, and makes the same step. The two must be equal bit by bit.
"""

import dataclasses
import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.engines.base import Batch, Engine, load_engine
from harness.measure.memory import DeviceMemory
from harness.probe import Listener, Probe, ShardSource
from harness.records.evidence import CheckpointReport
from harness.records.run_folder import RunSpec
from harness.tensors.shard import Shard
from harness.tensors.storage import plain_values
from harness.worker.batches import Batches
from harness.worker.process_group import wait_for_ranks

Progress = Callable[[str, int], None]


def save_checkpoint(
    engine: Engine,
    probe: Probe,
    batches: Callable[[int], Sequence[Batch]],
    spec: RunSpec,
    rank: int,
    memory: DeviceMemory,
    progress: Progress,
    folder: Path,
) -> CheckpointReport:
    """Save the state behind the last step, make the step after it, and return what the former cost and the latter did.

    An asynchronous save goes on during that step. The memory of saving is measured by itself.
    """
    next_step = spec.config.train.total_steps
    progress("saving", next_step)
    folder.mkdir(exist_ok=True)
    wait_for_ranks(memory.device)
    memory.reset_peak()
    began = time.perf_counter()
    write_position(folder, rank, next_step, memory.device)
    wait = engine.checkpoint.save(folder, spec.config.train.save == "async")
    save_seconds, peak_bytes = time.perf_counter() - began, memory.peak_allocated_bytes()
    step = observe_step(engine, probe, batches, next_step)
    total_seconds = save_seconds if wait is None else wait() - began
    wait_for_ranks(memory.device)  # so that the files of all ranks are complete
    own = [position_file(folder, rank), *engine.checkpoint.own_files(folder)]
    return CheckpointReport(
        save_seconds=save_seconds,
        save_total_seconds=total_seconds,
        rank_bytes=size_of(own),
        bytes=size_of(path for path in folder.rglob("*") if path.is_file()),
        save_peak_bytes=peak_bytes,
        file_system=file_system_type(folder),
        uninterrupted=step,
    )


def resume(
    spec: RunSpec, rank: int, memory: DeviceMemory, mesh: DeviceMesh, progress: Progress, folder: Path
) -> tuple[float, dict[str, str]]:
    """Load the state into a new engine, and return the seconds and what the step after the saved ones did there.

    The state is loaded twice, with a step in between that is forgotten: after their first step DDP and DeepSpeed sum
    gradients in another order, which rounds differently. The memory budget does not apply.
    """
    memory = dataclasses.replace(memory, budget_bytes=None)
    gc.collect()
    memory.empty_cache()
    probe = Probe()
    engine = load_engine(spec.layout.engine).build(spec.config, spec.layout, mesh, memory.device, probe)
    batches = Batches(spec.corpus, spec.config, spec.layout, rank, memory.device)
    timed, step = [], {}
    for phase in ("loading", "resuming"):
        progress(phase, spec.config.train.total_steps)
        wait_for_ranks(memory.device)
        began = time.perf_counter()
        engine.checkpoint.load(folder)
        next_step = read_position(folder, rank, memory.device)
        timed.append(time.perf_counter() - began)
        step = observe_step(engine, probe, batches, next_step)
    engine.close()
    return timed[0], step


def position_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's position in the data and of its random numbers."""
    return folder / f"position_{rank:05d}.pt"


def write_position(folder: Path, rank: int, next_step: int, device: torch.device) -> None:
    """Write which step's batch comes next, and the states of the generators of random numbers."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    position = {"next_step": next_step, "rng": torch.get_rng_state(), "device_rng": on_device}
    torch.save(position, position_file(folder, rank))


def read_position(folder: Path, rank: int, device: torch.device) -> int:
    """Restore the generators, and return the step whose batch comes next."""
    position = torch.load(position_file(folder, rank), weights_only=True)
    torch.set_rng_state(position["rng"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(position["device_rng"], device)
    return int(position["next_step"])


def observe_step(engine: Engine, probe: Probe, batches: Callable[[int], Sequence[Batch]], index: int) -> dict[str, str]:
    """Make a step by kernels that repeat their results, and return all that it did by names, as exact texts."""
    digests = GradientDigests()
    with probe.listen(digests), deterministic_kernels():
        result = engine.step(batches(index))
    scaling = {f"the {name} of the loss scaler": str(value) for name, value in engine.checkpoint.loss_scaling().items()}
    numbers = {"the loss": result.loss, "the gradient norm": result.grad_norm}
    return {
        "the number of the next batch": str(index),
        **scaling,
        **{name: float(value).hex() for name, value in numbers.items()},
        **digests.gradients,
        **digests_of("optimizer", engine),
        **digests_of("parameters", engine),
    }


class GradientDigests(Listener):
    """A listener that takes digests of a step's gradients when they are ready."""

    def __init__(self) -> None:
        self.gradients: dict[str, str] = {}

    def gradients_ready(self, engine: ShardSource) -> None:
        """Take the digests of this rank's gradients."""
        self.gradients = digests_of("gradients", engine)


def digests_of(kind: str, engine: ShardSource) -> dict[str, str]:
    """Return the digests of this rank's shards of one kind of state, by words that name each shard."""
    words = {"gradients": "gradient", "optimizer": "", "parameters": "parameter"}[kind]
    shards: Iterable[Shard] = engine.local_shards(kind)  # type: ignore[arg-type]
    return {f"the {shard.state_name or words} of {shard.name}{[*shard.box]}": digest(shard.local) for shard in shards}


@torch.no_grad()
def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    values = plain_values(tensor.detach()).reshape(-1).cpu().contiguous()
    return hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=8).hexdigest()


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Choose kernels that give the same bits every time, where torch has such; others only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes of files together."""
    return sum(path.stat().st_size for path in paths)


def file_system_type(folder: Path) -> str:
    """Return the type of the file system that a folder lies in, such as ext4; empty if it is not known."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (folder.resolve(), *folder.resolve().parents) if path in mounts), "")
