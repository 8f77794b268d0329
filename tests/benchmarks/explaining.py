"""What a run pays for its explanations: everything beyond warm-up and timed steps, in steps of the same training.

    python -m tests.benchmarks.explaining --out results/explaining.json

Each strategy and size is run twice in turn by the same two processes' launcher: as a row of the harness (without its
reference, which is another run), and as the same engine's warm-up and timed steps alone. The cost is the difference of
their times from the first step to the end of the rank, over the median timed step of the training alone; the rank that
was ready last counts, because the others' first step contains their waiting. It includes the profiled and the traced
steps, fingerprints, marks, the counting allocator and its log, and the rank's report. The processor time of the ranks,
which another load on the machine does not stretch, is compared as well.

Entries of the file for other sizes and strategies stay; each has its date, and the version of the measuring packages.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks.overhead import ROOT, describe_machine
from tests.benchmarks.timed_ranks import read_moments, train_alone, train_with_harness

RANKS = 2

# About 0.5, 10 and 100 million parameters, the largest with 512 tokens a step.
SIZES: dict[str, tuple[str, ...]] = {
    "0.5M": ("model=tiny",),
    "10M": (
        *("model=tiny", "model.hidden_size=320", "model.num_hidden_layers=4", "model.intermediate_size=896"),
        *("model.vocab_size=8000", "train.seq_len=128", "train.global_batch=8"),
    ),
    "100M": (
        *("model=tiny", "model.hidden_size=768", "model.num_hidden_layers=11", "model.num_attention_heads=12"),
        *("model.num_key_value_heads=12", "model.intermediate_size=2048", "model.vocab_size=16000"),
        *("train.seq_len=128", "train.global_batch=4", "train.steps=3", "train.warmup_steps=1"),
    ),
}

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp_full_shard", "tp", "tp_sp", "cp", "pp_1f1b")

CLOCKS = {"seconds": 2, "processor_seconds": 3}  # the place of each in a moment

Times = dict[str, Any]


def main() -> None:
    from tests.support.campaigns import parse_options  # here, as ranks import this module too

    options = parse_options(
        __doc__,
        sizes={"nargs": "+", "type": str, "choices": SIZES, "default": list(SIZES)},
        strategies={"nargs": "+", "type": str, "default": list(STRATEGIES)},
        repeats={"default": 3, "help": "of each side; the largest size has one"},
        out={"default": ROOT / "results" / "explaining.json"},
    )
    machine = describe_machine()
    identity = {"date": date.today().isoformat(), "code": machine["versions"]["code"]}
    earlier = json.loads(options.out.read_text())["entries"] if options.out.exists() else []
    entries = {(entry["size"], entry["strategy"]): entry for entry in earlier}
    with tempfile.TemporaryDirectory() as scratch:
        for size in options.sizes:
            for strategy in options.strategies:
                repeats = 1 if size == "100M" else options.repeats
                entries[size, strategy] = measure(size, strategy, repeats, Path(scratch)) | identity
                print(describe(entries[size, strategy]), flush=True)
                measured = list(entries.values())
                report = {"machine": machine, "ranks": RANKS, "summary": summarize(measured), "entries": measured}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(summarize(list(entries.values()))))
    print(options.out)


def measure(size: str, strategy: str, repeats: int, scratch: Path) -> Times:
    """Return the times of both sides of one training, and the cost of explaining by each clock."""
    sides: dict[str, Callable[[str], None]] = {"alone": train_alone, "harness": train_with_harness}
    times: dict[str, list[Times]] = {side: [] for side in sides}
    parameters = 0
    for repeat in range(repeats):
        for side in sorted(sides, reverse=repeat % 2 == 0):
            side_times, parameters = run_side(side, sides[side], size, strategy, scratch / f"{size}-{strategy}")
            times[side].append(side_times)
    cost = {clock: cost_in_steps(times["harness"], times["alone"], clock) for clock in CLOCKS}
    return {"size": size, "parameters": parameters, "strategy": strategy, "cost_in_steps": cost, **times}


def run_side(side: str, entry: Callable[[str], None], size: str, strategy: str, results: Path) -> tuple[Times, int]:
    """Return the times of one run by phase, and the number of the model's parameters."""
    from tests.support.commands import compose, execute_run

    to = (f"results_dir={results}", f"name={side}", "proof.reference=false", "force=true", "cluster.device=cpu")
    config, command = compose(*to, f"strategy={strategy}", f"world_size={RANKS}", *SIZES[size])
    record = execute_run(config, command, entry)
    if side == "harness" and record.row["status"] != "ok":
        raise SystemExit(f"{strategy} at {size} is no measured row: {record.row['reason']}")
    moments = read_moments(results / command.name / record.row["run_id"], RANKS)
    return {clock: phase_times(moments, place) for clock, place in CLOCKS.items()}, record.row["parameters"]


def phase_times(moments: list[list[Any]], place: int) -> Times:
    """Return the time of the rank that was ready last, in all and by phase, and its median timed step."""
    own = min(moments, key=lambda of_rank: of_rank[-1][place] - of_rank[0][place])
    phases: dict[str, float] = {}
    steps = []
    for entry, following in pairwise(own):
        duration = following[place] - entry[place]
        phases[entry[0]] = phases.get(entry[0], 0.0) + duration
        steps += [duration] if entry[0] == "timed" and following[0] == "timed" else []
    return {"whole": own[-1][place] - own[0][place], "step": statistics.median(steps), "phases": phases}


def cost_in_steps(harness: Sequence[Times], alone: Sequence[Times], clock: str) -> float:
    """Return the additional time of the harness, over a step of the training alone, each a median over repeats."""

    def median(side: Sequence[Times], key: str) -> float:
        return statistics.median(times[clock][key] for times in side)

    return (median(harness, "whole") - median(alone, "whole")) / median(alone, "step")


def summarize(entries: Sequence[Times]) -> dict[str, Any]:
    """Return the median and the largest cost over all strategies and sizes, and at each size."""
    summary: dict[str, Any] = {}
    for size in ("all", *dict.fromkeys(entry["size"] for entry in entries)):
        chosen = [entry["cost_in_steps"] for entry in entries if size in ("all", entry["size"])]
        costs = {clock: [cost[clock] for cost in chosen] for clock in CLOCKS}
        summary[size] = {clock: {"median": statistics.median(of), "most": max(of)} for clock, of in costs.items()}
    return summary


def describe(entry: Times) -> str:
    """Return a line with the cost of one training and where it arises, in its steps."""
    step = statistics.median(times["seconds"]["step"] for times in entry["alone"])
    phases = entry["harness"][-1]["seconds"]["phases"]
    parts = ", ".join(f"{phase} {seconds / step:.1f}" for phase, seconds in phases.items())
    warm = entry["alone"][-1]["seconds"]["phases"]["warm-up"] / step
    cost = entry["cost_in_steps"]
    return (
        f"{entry['size']} {entry['strategy']}: {cost['seconds']:.1f} steps of {1000 * step:.1f} ms,"
        f" {cost['processor_seconds']:.1f} in processor time (harness: {parts}; alone: warm-up {warm:.1f})"
    )


if __name__ == "__main__":
    main()
