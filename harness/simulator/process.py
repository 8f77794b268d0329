"""Simulated ranks in a process of their own, into which the device guard is loaded before torch."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import Device, RunConfig
from harness.layout.layout import Layout
from harness.records.rank_report import RankReport
from harness.simulator.native_guard import build_device_guard


@dataclass(frozen=True)
class StepRequest:
    """A training step of one rank that is to be simulated."""

    config: RunConfig
    layout: Layout
    rank: int = 0
    device: Device = "cuda"
    device_name: str = "simulated CUDA device"
    device_bytes: int | None = 80 * 10**9  # of the whole device; None is no limit


def simulate_steps(
    requests: Sequence[StepRequest], cache: Path, module: Sequence[str] = ("harness.simulator",)
) -> list[RankReport]:
    """Return the report of every requested step, in order; one that failed has the status `error` and a traceback.

    One process, which runs `module` with its arguments, simulates all of them, one after another. Native code is built
    in the folder `cache`. Raise RuntimeError if the process itself fails.
    """
    guard = str(build_device_guard(cache))
    tasks = json.dumps({"guard": guard, "requests": [dataclasses.asdict(request) for request in requests]})
    command = [sys.executable, "-m", *module]
    result = subprocess.run(command, input=tasks, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the simulator ended with exit code {result.returncode}: {result.stderr[-2000:]}")
    return [RankReport.from_json(values) for values in json.loads(result.stdout)]
