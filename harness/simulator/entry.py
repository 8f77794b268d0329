"""The entry point of a simulated run, in the place of a rank's: it starts the simulator in a process of its own."""

import subprocess
import sys


def simulator_entry(run_dir: str) -> None:
    """Simulate the ranks that the run file names, and let each write its report.

    The device guard has to be loaded before torch, which this process may have imported already. The simulator ends
    with this process. Raise RuntimeError if the simulator fails.
    """
    command = [sys.executable, "-m", "harness.simulator", run_dir]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the simulator ended with exit code {result.returncode}")
