"""What the harness costs: the same training as a plain torchrun script and as one row of a sweep, in turns.

    python -m tests.benchmarks.overhead --pairs 15 --out results/overhead.json

Both have the model, batches, optimizer, warm-up and timed steps of strategy=ddp model=tiny on two CPU processes, with
the same threads and environment (GOMP_SPINCOUNT too, so that what it gains is not counted for the harness). One
process runs all rows, as in a sweep: from the second on, ranks are forked from a warm process and the reference is on
file. The first pair, the cold one, is reported by itself. A row's wall time is all a sweep does for it once its
configuration is composed: plan, ranks, proof and record. The script's is that of its command. Fails where the two do
not train the same.

Imports are inside the functions: multiprocessing imports this module anew in every rank, as it does not the harness's.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
LOSS_BOUND = 1e-5  # relative, of every step
RESAMPLES = 10_000
FEWEST = 3  # ratios for which an interval says anything

Seen = dict[str, Any]  # step_seconds, seconds (of each step), losses, wall_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The harness against a plain torchrun script.")
    parser.add_argument("--pairs", type=int, default=15, help="warm pairs of each number of steps, after a cold one")
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 40], help="timed steps; each gets its pairs")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "overhead.json")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        report = {
            "machine": this_machine(),
            "comparisons": [compare(steps, asked.pairs, Path(scratch) / str(steps)) for steps in asked.steps],
        }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    for comparison in report["comparisons"]:
        print(in_words(comparison))
    print(asked.out)
    return 0


def this_machine() -> dict[str, Any]:
    from harness import launch, machine, records
    from harness.config import ClusterConfig
    from harness.measure.environment import environment

    given = launch.rank_environment("cpu", RANKS)
    return {
        "versions": records.versions(),
        "commit": records.git_commit(),
        "environment": environment(machine.look(ClusterConfig("local", device="cpu"))),
        "ranks": {name: given[name] for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")},
    }


def compare(steps: int, pairs: int, scratch: Path) -> dict[str, Any]:
    """The pairs of one number of timed steps, in alternating order, and their ratios, harness over script."""
    script, row = both(steps, scratch)
    found = []
    for index in range(pairs + 1):
        order: list[tuple[str, Callable[[], Seen]]] = [("bare", script), ("harness", row)]
        seen = {name: run() for name, run in (order if index % 2 else reversed(order))}
        agree(seen["bare"]["losses"], seen["harness"]["losses"])
        ratios = {key: seen["harness"][key] / seen["bare"][key] for key in ("step_seconds", "wall_seconds")}
        found.append({"cold": index == 0, **seen, "ratios": ratios})
    warm = [pair["ratios"] for pair in found[1:]]
    summary = {key: summarised([ratios[key] for ratios in warm]) for key in ("step_seconds", "wall_seconds")}
    return {"steps": steps, "ratios": summary, "cold": found[0]["ratios"], "pairs": found}


def both(steps: int, scratch: Path) -> tuple[Callable[[], Seen], Callable[[], Seen]]:
    """The script and the row, ready to run as often as wanted."""
    from harness import machine, run, worker
    from tests.conftest import composed

    values = ("strategy=ddp", "model=tiny", "cluster.device=cpu", f"world_size={RANKS}", "force=true")
    config = composed(*values, f"train.steps={steps}", "name=overhead", f"results_dir={scratch}")
    job, _ = run.prepare(run.plan(config, machine.look(config.cluster)))
    folder = scratch / "bare"
    folder.mkdir(parents=True)
    job.write(folder)

    def row() -> Seen:
        began = time.perf_counter()
        planned = run.plan(config, machine.look(config.cluster))
        record = run.execute(planned, [], lambda _: None, lambda _: None, worker.main)
        wall_seconds = time.perf_counter() - began
        if record["row"]["status"] != "ok":
            raise SystemExit(f"the harness's row is no row: {record['row']['reason']}")
        lines = (planned.directory / "steps.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines[: config.train.warmup_steps + steps]]  # the rest is profiled
        return {
            "step_seconds": record["row"]["step_seconds"],
            "seconds": [entry["seconds"] for entry in entries if entry["phase"] == "timed"],
            "losses": [entry["loss"] for entry in entries],
            "wall_seconds": wall_seconds,
        }

    return lambda: torchrun(folder), row


def torchrun(folder: Path) -> Seen:
    """The plain script, as its user starts it."""
    from harness.launch import rank_environment

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-port", str(free_port()), "-m", "tests.benchmarks.bare_ddp", str(folder)]
    began = time.perf_counter()
    environment = os.environ | rank_environment("cpu", RANKS)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    wall_seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"the script failed:\n{done.stderr}")
    seen: Seen = json.loads(done.stdout)
    return seen | {"wall_seconds": wall_seconds}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def agree(bare: Sequence[float], harness: Sequence[float]) -> None:
    """Raises SystemExit if any step's losses differ."""
    for step, (expected, found) in enumerate(zip(bare, harness, strict=True)):
        if not abs(found - expected) <= LOSS_BOUND * abs(expected):
            raise SystemExit(f"not the same training: loss {expected} in the script, {found} in step {step} of the row")


def summarised(ratios: Sequence[float]) -> dict[str, Any]:
    """The median and its 95 % interval by the bootstrap's percentiles (Efron 1979); None with too few ratios."""
    if not ratios:
        return {"median": None, "interval": None}
    if len(ratios) < FEWEST:
        return {"median": statistics.median(ratios), "interval": None}
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    interval = [medians[round(share * (RESAMPLES - 1))] for share in (0.025, 0.975)]
    return {"median": statistics.median(ratios), "interval": interval}


def in_words(comparison: dict[str, Any]) -> str:
    def said(key: str) -> str:
        summary = comparison["ratios"][key]
        if summary["median"] is None:
            return "unknown"
        interval = summary["interval"]
        return f"{summary['median']:.3f}" + (f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})" if interval else "")

    pairs = len(comparison["pairs"]) - 1
    return (
        f"{comparison['steps']} steps, {pairs} warm pairs, harness over script: a step {said('step_seconds')},"
        f" the whole run {said('wall_seconds')}; the cold pair's whole run {comparison['cold']['wall_seconds']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
