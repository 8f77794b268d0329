"""The simulator's process: read requests as JSON from standard input, and write a report for each."""

import json
import os
import sys
from pathlib import Path

from harness.simulator.native_guard import load_device_guard


def main(guard: str) -> None:
    """Simulate every request of standard input with the device guard of this path."""
    load_device_guard(Path(guard))
    from harness.config.from_dict import from_dict
    from harness.simulator.process import StepRequest
    from harness.simulator.rank import simulate_rank

    requests = json.load(sys.stdin)
    print(json.dumps([simulate_rank(from_dict(StepRequest, values)).to_json() for values in requests]))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the simulated device cannot be ended in order
