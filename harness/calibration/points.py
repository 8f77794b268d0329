"""The points that a calibration measures, as plain data: what ran, its sizes, and its median seconds. No torch."""

import importlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.config.from_dict import from_dict
from harness.config.schema import Device
from harness.cost_model.timing.kernels import fused_attention_flops
from harness.launcher.forkserver import threads_per_rank
from harness.launcher.launch import launch
from harness.util.errors import UserError
from harness.util.files import atomic_write_json

# The files in a calibration's folder by which the parent and the ranks talk.
SPEC_FILE, RESULT_FILE = "calibration.json", "measurements.json"

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True)
class MatmulPoint:
    """The product of an (m, k) with a (k, n) matrix."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def operations(self) -> float:
        """The floating-point operations of the product."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionPoint:
    """Causal attention by torch's fused kernel."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    forward_seconds: float
    backward_seconds: float

    @property
    def operations(self) -> float:
        """The floating-point operations of the forward pass."""
        return fused_attention_flops(self.batch * self.seq_len, self.seq_len, self.heads, self.head_dim, 0.5)


@dataclass(frozen=True)
class MemoryPoint:
    """A kernel that does nothing but read and write device memory."""

    operation: Literal["copy", "add", "to_host"]
    in_cache: bool  # whether its tensors may lie in the device's caches
    bytes_moved: int  # read and written; to the host, sent
    seconds: float


@dataclass(frozen=True)
class LaunchPoint:
    """A chain of operators on tensors of a few bytes, in forward and backward."""

    kernels: int
    seconds: float  # of the host


@dataclass(frozen=True)
class CollectivePoint:
    """A collective of so many bytes, all ranks' together; `send` is one transfer between two ranks."""

    operation: Collective
    ranks: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class OverlapPoint:
    """Matrix products beside an all-reduce, and each of both alone."""

    kernel_seconds: float
    collective_seconds: float
    both_seconds: float


@dataclass(frozen=True)
class Measurements:
    """Everything that the ranks of one machine measured."""

    ranks: int
    dtype: str  # of matrix products and attention, by torch's name
    width: int  # bytes per element of it
    matmuls: tuple[MatmulPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    memories: tuple[MemoryPoint, ...] = ()
    launches: tuple[LaunchPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
    overlaps: tuple[OverlapPoint, ...] = ()
    host_copies: tuple[MemoryPoint, ...] = ()  # none on a CPU


TIME_LIMIT_SECONDS = 900.0


def rank_entry(run_dir: str) -> None:
    """Measure as one rank. The parent does not import what measures."""
    importlib.import_module("harness.calibration.rank").main(run_dir)


def measure_machine(device: Device, ranks: int, dtype: str, quick: bool) -> Measurements:
    """Return what so many ranks of this machine measure. Raises UserError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="harness-calibrate-") as folder:
        run_dir = Path(folder)
        spec = {"device": device, "dtype": dtype, "quick": quick, "threads": threads_per_rank(ranks)}
        atomic_write_json(run_dir / SPEC_FILE, spec)
        outcome = launch(rank_entry, run_dir, ranks, device=device, timeout_seconds=TIME_LIMIT_SECONDS)
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        if outcome.status != "ok":
            raise UserError(f"harness calibrate could not measure: {outcome.reason}")
        return from_dict(Measurements, json.loads((run_dir / RESULT_FILE).read_text()))
