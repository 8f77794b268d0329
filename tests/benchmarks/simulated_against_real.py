"""Compare simulated ranks with the real runs of a table of random runs, on a simulated CPU.

python -m tests.benchmarks.simulated_against_real --table results/random_runs.csv --out results/simulator/cpu.csv
Every run of the table that was proven is simulated: its rank with the highest peak, and one rank for every group of
ranks that run the same operations, which add up to those of the run. Peaks are compared without the copies that gloo
makes, which no process group of a simulation makes. Draws that the output has are not simulated again, unless --again
is given.
"""

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.layout.layout import Layout, resolve_layout
from harness.metrics.columns import communication_bytes
from harness.records.rank_report import RankReport
from harness.simulator.process import StepRequest
from tests.support.campaigns import FLAG, REQUIRED_PATH, parse_options, read_table, write_table
from tests.support.commands import compose
from tests.support.simulated_steps import simulate_steps

BATCH = 16  # draws in one process

EXACT = ("communication_bytes", "executed_flops")

COLUMNS = (
    *("draw", "strategy", "engine", "checkpointing", "precision", "world_size", "parameters", "outcome", "reason"),
    *("peak_bytes", "simulated_peak_bytes", "peak_ratio"),
    *(name for exact in EXACT for name in (exact, f"simulated_{exact}")),
    "overrides",
)

Line = dict[str, str]


def requests_of(line: Line) -> tuple[str, int, list[StepRequest]]:
    """Return why a run is not simulated, or how many ranks stand for all, their requests and that of the fullest."""
    config, _ = compose(*line["overrides"].split(), "name=random")
    layout = resolve_layout(config.strategy, config.world_size or 1)
    engine = config.strategy.engine
    refused = {"compiled": config.train.compile, f"engine {engine}": engine != "torch"}
    reason = next((reason for reason, applies in refused.items() if applies), "")
    distinct = distinct_ranks(config, layout)
    ranks = [] if reason else list(dict.fromkeys([*distinct, int(line["peak_rank"] or 0)]))
    return reason, len(distinct), [StepRequest(config, layout, rank, "cpu", "cpu", None) for rank in ranks]


def distinct_ranks(config: RunConfig, layout: Layout) -> list[int]:
    """Return a rank for every stage, every share of an uneven vocabulary, and every span of eager attention.

    A rank's span of the sequence decides where torch may stop the second forward of plain operators.
    """
    stages = range(0, layout.world_size, layout.world_size // layout.pp)
    spans = range(layout.cp if config.model.attention == "eager" else 1)
    shares = range(layout.tp if config.model.vocab_size % layout.tp else 1)
    # Ranks of tensor parallelism are neighbors, and those of context parallelism are next.
    return [stage + span * layout.tp + share for stage in stages for span in spans for share in shares]


def compare(line: Line, distinct: int, reports: list[RankReport]) -> dict[str, Any]:
    """Return the line of the output: the measured and the simulated figures, or the error of the simulation."""
    failed = next((report for report in reports if report.status != "ok"), None)
    if failed:
        return {"outcome": "error", "reason": f"{failed.error}: {failed.reason}"}
    fullest = next(report for report in reports if report.rank == int(line["peak_rank"] or 0))
    measured, simulated = int(line["peak_without_backend_bytes"]), fullest.profiled.peak_allocated_bytes or 0
    copies = int(line["world_size"]) // distinct
    return {
        "outcome": "simulated",
        "peak_bytes": measured,
        "simulated_peak_bytes": simulated,
        "peak_ratio": f"{simulated / measured:.5f}",
        "communication_bytes": line["communication_bytes"],
        "simulated_communication_bytes": communication_bytes(reports),
        "executed_flops": line["executed_flops"],
        "simulated_executed_flops": copies * sum(rank.profiled.flops for rank in reports[:distinct]),
    }


def simulate(lines: list[Line]) -> list[dict[str, Any]]:
    """Return the lines of the output for these runs, all simulated in one process."""
    work = [(line, *requests_of(line)) for line in lines]
    reports = iter(simulate_steps([request for *_, requests in work for request in requests]))
    results = []
    for line, reason, distinct, requests in work:
        own = [next(reports) for _ in requests]
        result = {"outcome": "refused", "reason": reason} if reason else compare(line, distinct, own)
        results.append({name: line.get(name, "") for name in COLUMNS} | {"reason": ""} | result)
    return results


def summarize(results: list[dict[str, Any]]) -> None:
    """Print how many runs were simulated, and how far the simulations are from the runs."""
    simulated = [line for line in results if line["outcome"] == "simulated"]
    ratios = sorted(abs(float(line["peak_ratio"]) - 1) for line in simulated)
    counts = Counter(line["outcome"] for line in results)
    print(f"{len(results)} runs: {len(simulated)} simulated, {counts['refused']} refused, {counts['error']} failed")
    if not ratios:
        return
    print(f"peak: median {statistics.median(ratios):.4%}, worst {ratios[-1]:.2%}")
    for name in EXACT:
        differing = [line["draw"] for line in simulated if int(line[name] or 0) != int(line[f"simulated_{name}"] or 0)]
        print(f"{name}: {len(simulated) - len(differing)} equal, others {' '.join(differing)}")


def main() -> None:
    arguments = parse_options(
        __doc__,
        table={"default": Path("results/random_runs.csv")},
        out=REQUIRED_PATH,
        engine={"default": "torch", "help": "only runs of this engine"},
        most={"default": 10**9, "help": "stop after so many runs"},
        again=FLAG | {"help": "simulate all runs again"},
    )
    runs = [line for line in read_table(arguments.table) if line["outcome"] == "proven"]
    runs = [line for line in runs if line["engine"] == arguments.engine and line.get("peak_without_backend_bytes")]
    known = {} if arguments.again else {line["draw"]: line for line in read_table(arguments.out)}
    missing = [line for line in runs if line["draw"] not in known or known[line["draw"]]["outcome"] == "error"]
    missing = missing[: arguments.most]
    for start in range(0, len(missing), BATCH):
        known |= {line["draw"]: line for line in simulate(missing[start : start + BATCH])}
        write_table(arguments.out, COLUMNS, sorted(known.values(), key=lambda line: int(line["draw"])))
        summarize(list(known.values()))


if __name__ == "__main__":
    main()
