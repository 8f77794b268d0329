"""Single steps of simulated ranks, without a run's folder: `python -m tests.support.simulated_steps` reads requests.

Requests are JSON on standard input, and reports are printed. torch may be imported only once the guard is loaded.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.config.from_dict import from_dict
from harness.records.rank_report import RankReport
from harness.simulator.process import StepRequest, build_device_guard, load_device_guard

CACHE = Path("~/.cache/harness").expanduser()


def simulate_steps(
    requests: Sequence[StepRequest], cache: Path = CACHE, module: Sequence[str] = (__name__,)
) -> list[RankReport]:
    """Return the report of every requested step, in order; one that failed has the status `error` and a traceback.

    One process, which runs `module` with its arguments, simulates all of them, one after another. Native code is built
    in the folder `cache`. Raise RuntimeError if the process itself fails.
    """
    plain = [dataclasses.asdict(entry) | {"config": entry.config.to_dict()} for entry in requests]
    values = {"guard": str(build_device_guard(cache)), "requests": plain}
    command = [sys.executable, "-m", *module]
    result = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the simulator ended with exit code {result.returncode}: {result.stderr[-2000:]}")
    return [RankReport.from_json(values) for values in json.loads(result.stdout)]


def main(prepare: Callable[[], None] = lambda: None) -> None:
    """Simulate every request and print a report for each; `prepare` is called as soon as torch may be imported."""
    values = json.load(sys.stdin)
    load_device_guard(values["guard"])
    from harness.simulator.rank import simulate_ranks_of_layout

    prepare()
    requests = [from_dict(StepRequest, request) for request in values["requests"]]
    layouts = itertools.groupby(requests, key=lambda request: (request.config, request.layout))
    print(json.dumps([report.to_json() for _, same in layouts for report in simulate_ranks_of_layout(list(same))]))
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the simulated device cannot be ended in order


if __name__ == "__main__":
    main()
