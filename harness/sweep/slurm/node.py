"""The program of a Slurm job on each of its nodes: `python -m harness.sweep.slurm.node FILE`."""

import os
import sys
from pathlib import Path

from harness.sweep.jobs.node import run_node
from harness.util.text import run_command

FIRST_PORT, PORTS = 20_000, 20_000  # a job's nodes meet at a port that follows from the job's number


def main() -> int:
    """Run this node's part of the job, which Slurm's variables describe, and return its exit status."""
    count, rank = int(os.environ.get("SLURM_NNODES", 1)), int(os.environ.get("SLURM_NODEID", 0))
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    port = FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", 0)) % PORTS
    end = os.environ.get("SLURM_JOB_END_TIME")
    return run_node(Path(sys.argv[1]), count, rank, address, port, float(end) if end else None)


if __name__ == "__main__":
    sys.exit(run_command(main))
