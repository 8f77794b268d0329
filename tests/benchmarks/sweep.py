"""The cost of a whole sweep per combination: the real command with twenty runs beside a plain torchrun script.

    python -m tests.benchmarks.sweep --rounds 3 --out results/overhead_sweep.json

In each round the command's wall time divided by its runs (start of Python, composition, reference, every run, tracking,
table and report) is compared with the median of the scripts run before and after it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.overhead import ROOT, Pair, describe_machine
from tests.support.campaigns import parse_options

STEPS = 10

SCRIPTS = 2  # before each command, and after it


def main() -> None:
    options = parse_options(
        __doc__,
        rounds={"default": 3},
        runs={"default": 20, "help": "of each sweep"},
        out={"default": ROOT / "results" / "overhead_sweep.json"},
    )
    with tempfile.TemporaryDirectory() as scratch:
        pair = Pair(STEPS, Path(scratch) / "pair")
        rounds = [run_round(pair, options.runs, Path(scratch) / str(index)) for index in range(options.rounds)]
    ratio = statistics.median(result["ratio"] for result in rounds)
    report = {"machine": describe_machine(), "steps": STEPS, "runs": options.runs, "ratio": ratio, "rounds": rounds}
    options.out.write_text(json.dumps(report) + "\n")
    seconds = statistics.median(result["sweep_seconds"] / options.runs for result in rounds)
    print(
        f"a combination in a sweep of {options.runs}, {STEPS} steps: {ratio:.3f} of the script's time ({seconds:.2f} s)"
    )
    print(options.out)


def run_round(pair: Pair, runs: int, results: Path) -> dict[str, Any]:
    scripts = [pair.start_script().finish()["wall_seconds"] for _ in range(SCRIPTS)]
    seconds = sweep_seconds(runs, results)
    scripts += [pair.start_script().finish()["wall_seconds"] for _ in range(SCRIPTS)]
    ratio = seconds / runs / statistics.median(scripts)
    return {"sweep_seconds": seconds, "script_seconds": scripts, "ratio": ratio}


def sweep_seconds(runs: int, results: Path) -> float:
    """Return the seconds of a sweep that is started as a user starts it, tracking included."""
    settings = (
        "name=twenty",
        f"results_dir={results}",
        f"train.steps={STEPS}",
        f"repeats={runs}",
        "cluster.device=cpu",
    )
    command = [sys.executable, "-m", "harness", "-m", *settings, "cluster.device=cpu"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    recorded = len(list(results.glob("twenty/*/record.json")))
    if done.returncode != 0 or recorded != runs:
        raise SystemExit(f"the sweep recorded {recorded} of {runs} rows:\n{done.stderr}")
    return seconds


if __name__ == "__main__":
    main()
