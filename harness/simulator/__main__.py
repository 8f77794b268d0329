"""The simulator's process: it simulates the ranks that a run file names, and writes the report of each."""

import os
import sys
from pathlib import Path

from harness.records.run_folder import read_run_spec
from harness.simulator.process import load_device_guard
from harness.util.parent_death import die_with_parent


def main(run_dir: Path) -> None:
    """Simulate the ranks of a run's folder."""
    spec = read_run_spec(run_dir)
    if spec.device_guard is not None:
        load_device_guard(spec.device_guard)
    from harness.simulator.rank import simulate_ranks

    simulate_ranks(spec, run_dir)


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the simulated device cannot be ended in order
