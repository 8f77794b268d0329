"""One rank of a larger world that runs alone, with real tensors and kernels: the worker's own code from end to end."""

import os
from pathlib import Path

from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import RunFolder
from harness.records.run_spec import read_run_spec
from harness.simulator.virtual_group import join_virtual_ranks
from harness.worker.main import report_rank

PROCESS_RANK = 0  # by which the launcher knows the process


def run_next_rank(directory: Path) -> None:
    """Run the first of the run file's ranks that has no report yet, and write its report.

    Raise StopIteration if all have one. A failure is reported and then raised.
    """
    spec, folder = read_run_spec(directory), RunFolder(directory)
    rank = next(rank for rank in spec.simulated_ranks if not folder.rank_report(rank).exists())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(spec.layout.world_size))
    report_rank(directory, rank, HeartbeatWriter(directory, PROCESS_RANK), join_virtual_ranks)
