"""The points that a calibration measures, as plain data: what ran, its sizes, and its median seconds. No torch."""

import importlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.config.from_dict import from_dict
from harness.config.schema import Device
from harness.launcher.forkserver import threads_per_rank
from harness.launcher.launch import launch
from harness.util.files import atomic_write_json
from harness.util.text import UserError

# The files in a calibration's folder by which the parent and the ranks talk.
SPEC_FILE, RESULT_FILE = "calibration.json", "measurements.json"

TIME_LIMIT_SECONDS = 900.0

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True)
class Point:
    """One kernel, collective or chain of operators of one size."""

    # product; forward and backward of causal attention by torch's fused kernel; memory and memory in caches, which is
    # only read and written; launch, to_host, or a Collective.
    curve: str
    # Of a product m, n, k; of attention batch, heads, seq_len, head_dim; of a collective the ranks.
    sizes: tuple[int, ...]
    work: float  # operations; bytes read and written, or sent, or of all ranks together; or the number of launches
    seconds: float

    @property
    def rate(self) -> float:
        """The work of a second."""
        return self.work / self.seconds


@dataclass(frozen=True)
class Measurements:
    """Everything that the ranks of one machine measured."""

    ranks: int
    dtype: str  # of matrix products and attention, by torch's name
    # Bytes per element of it that a product moves before and after its operations; 0 on a GPU, as it overlaps both.
    width: int
    points: tuple[Point, ...] = ()
    # The time of products beside an all-reduce beyond that of the products alone, over that of the all-reduce alone.
    overlap_slowdown: float | None = None  # None with a single rank

    def of(self, *curves: str) -> list[Point]:
        """Return the points of some curves, but for those that take no longer than a launch.

        Calls follow each other, and a GPU runs one while its host launches the next: such times are the host's.
        """
        launch = max(point.seconds / point.work for point in self.points if point.curve == "launch")
        return [point for point in self.points if point.curve in curves and point.seconds > launch]


def rank_entry(run_dir: str) -> None:
    """Measure as one rank. The parent does not import what measures."""
    importlib.import_module("harness.calibration.kernels").main(run_dir)


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
