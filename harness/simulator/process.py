"""Simulated ranks in a process of their own, into which the device guard is loaded before torch."""

import ctypes
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import Device, RunConfig
from harness.hardware.machine import is_built_for_gpus
from harness.layout.layout import Layout
from harness.measure.native_allocator import build_torch_library


@dataclass(frozen=True)
class StepRequest:
    """A training step of one rank that is to be simulated."""

    config: RunConfig
    layout: Layout
    rank: int = 0
    device: Device = "cuda"
    device_name: str = "simulated CUDA device"
    device_bytes: int | None = 80 * 10**9  # of the whole device; None is no limit


_SOURCE = Path(__file__).with_name("device_guard.cpp")


def build_device_guard(cache: Path) -> Path:
    """Return the path of the compiled guard. Raise UserError or RuntimeError if it cannot be built."""
    return build_torch_library("the stand-in for a GPU", _SOURCE, cache, ["-O1", "-ltorch_cpu"])


def load_device_guard(path: str) -> None:
    """Load the guard of this path into this process, for good; a build of torch for CUDA is imported too.

    Raise RuntimeError if torch is imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the device guard must be loaded before it")
    library = ctypes.CDLL(path)
    if is_built_for_gpus():
        importlib.import_module("torch")  # it registers the guard of CUDA, which is replaced
        library.install_simulated_guard()


def simulator_entry(run_dir: str) -> None:
    """Simulate the ranks that the run file names, and let each write its report.

    The device guard has to be loaded before torch, which this process may have imported already. The simulator ends
    with this process. Raise RuntimeError if the simulator fails.
    """
    command = [sys.executable, "-m", "harness.simulator", run_dir]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the simulator ended with exit code {result.returncode}")


def virtual_entry(run_dir: str) -> None:
    """Run one rank of a virtual run. Its code is imported only here, because the parent does not need the imports."""
    importlib.import_module("harness.simulator.virtual_rank").run_next_rank(Path(run_dir))
