"""The simulated ranks of one run, from its run file to their reports."""

from pathlib import Path

from harness.records.heartbeat import HeartbeatWriter
from harness.records.rank_report import RankReport
from harness.records.run_folder import RunFolder
from harness.records.run_spec import RunSpec
from harness.simulator.layout_ranks import simulate_ranks_of_layout
from harness.simulator.process import StepRequest
from harness.util.files import atomic_write_json


def simulate_ranks(spec: RunSpec, run_dir: Path) -> None:
    """Simulate the ranks that a run file names, one after another, and write the report of each and the trace of all.

    A report is written as soon as its rank was simulated, and again with the time for which it waits for other stages.
    """
    folder = RunFolder(run_dir)

    def write(report: RankReport) -> None:
        atomic_write_json(folder.rank_report(report.rank), report.to_json())

    requests = [
        StepRequest(spec.config, spec.layout, rank, spec.device, spec.device_name, spec.device_bytes)
        for rank in spec.simulated_ranks
    ]
    heartbeat = HeartbeatWriter(run_dir, 0)  # the launcher knows this process as rank 0
    for report in simulate_ranks_of_layout(requests, heartbeat, write, folder.trace):
        write(report)
