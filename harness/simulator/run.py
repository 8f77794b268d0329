"""The simulated ranks of one run, from its run file to their reports."""

import os
from pathlib import Path

from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import RunFolder
from harness.records.run_spec import RunSpec
from harness.simulator.process import StepRequest
from harness.simulator.rank import simulate_rank
from harness.util.files import atomic_write_json


def simulate_ranks(spec: RunSpec, run_dir: Path) -> None:
    """Simulate the ranks that a run file names, one after another, and write the report of each."""
    os.environ.update(spec.environment)
    heartbeat = HeartbeatWriter(run_dir, 0)  # the launcher knows this process as rank 0
    for rank in spec.simulated_ranks:
        request = StepRequest(spec.config, spec.layout, rank, spec.device, spec.device_name, spec.device_bytes)
        report = simulate_rank(request, heartbeat)
        atomic_write_json(RunFolder(run_dir).rank_report(rank), report.to_json())
