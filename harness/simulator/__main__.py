"""The simulator's process: the ranks of a run's folder, or requests as JSON from standard input."""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from harness.simulator.process import load_device_guard
from harness.util.parent_death import die_with_parent


def simulate_run(run_dir: Path) -> None:
    """Simulate the ranks that a run file names, and write the report of each."""
    from harness.records.run_folder import read_run_spec

    spec = read_run_spec(run_dir)
    if spec.device_guard is not None:
        load_device_guard(spec.device_guard)
    from harness.simulator.layout_ranks import simulate_ranks

    simulate_ranks(spec, run_dir)


def simulate_requests(prepare: Callable[[], None] = lambda: None) -> None:
    """Simulate every request of standard input, and print a report for each; ranks of one layout follow each other.

    `prepare` is called as soon as torch may be imported.
    """
    values = json.load(sys.stdin)
    load_device_guard(values["guard"])
    from harness.config.from_dict import from_dict
    from harness.simulator.layout_ranks import simulate_ranks_of_layout
    from harness.simulator.process import StepRequest

    prepare()
    requests = [from_dict(StepRequest, request) for request in values["requests"]]
    layouts = itertools.groupby(requests, key=lambda request: (request.config, request.layout))
    reports = [report for _, group in layouts for report in simulate_ranks_of_layout(list(group))]
    print(json.dumps([report.to_json() for report in reports]))


if __name__ == "__main__":
    die_with_parent()
    if len(sys.argv) > 1:
        simulate_run(Path(sys.argv[1]))
    else:
        simulate_requests()
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the simulated device cannot be ended in order
