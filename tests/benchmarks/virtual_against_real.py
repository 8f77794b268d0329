"""Compare virtual ranks with the same ranks of real runs on this machine's CPU.

python -m tests.benchmarks.virtual_against_real --out results/simulator/virtual_against_real.csv
Of every strategy that has several ranks, the first random draws of tests.support.random_draws are run twice: with all
ranks as processes, and as the one virtual rank whose real peak is highest. Peaks are compared without the copies that
gloo makes, which no process group of a virtual run makes. Layers are not compiled. Draws that the output has are not
run again, so that the work can be interrupted. Of times only those of the processor are compared, which other load
changes least; a real rank's have what gloo computes.
"""

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.metrics.columns import sent_bytes
from harness.records.rank_report import RankReport
from harness.records.schema import Record
from harness.runner import resolve
from harness.runner.plan import make_plan
from harness.util.text import UserError
from tests.support.campaigns import REQUIRED_PATH, Line, complete_table, parse_options, read_table
from tests.support.commands import ROOT, compose, compose_config, execute_run
from tests.support.random_draws import draw_real_size, listed

MOST_RANKS = 8

STEPS = 2  # timed ones of a run

LONE = ("single", "dp", "search")  # presets without other ranks; draws of `single` with several have random degrees

RANDOM_DEGREES_DRAWS = 8

EXACT = ("bytes_sent", "flops")

KEYS = ("draw", "overrides")

COLUMNS = (
    *("draw", "strategy", "engine", "checkpointing", "precision", "world_size", "parameters", "rank", "outcome"),
    *("reason", "peak_bytes", "virtual_peak_bytes", "peak_ratio"),
    *(name for exact in EXACT for name in (exact, f"virtual_{exact}")),
    *("processor_seconds", "virtual_processor_seconds", "overrides"),
)


def chosen_draws(per_strategy: int) -> Iterator[tuple[str, str]]:
    """Yield number and overrides of the draws, the first ones of each strategy that this machine does not refuse."""
    presets = sorted({path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")} - {*LONE})
    wanted = dict.fromkeys(presets, per_strategy) | {"single": RANDOM_DEGREES_DRAWS}
    for seed in itertools.count():
        if not any(wanted.values()):
            return
        overrides = draw_real_size(seed, MOST_RANKS) | {"train.compile": False, "train.steps": STEPS}
        strategy, settings = overrides["strategy"], listed(overrides)
        if overrides["world_size"] > 1 and wanted.get(strategy) and is_possible(settings):
            wanted[strategy] -= 1
            yield str(seed), " ".join(settings)


def is_possible(overrides: list[str]) -> bool:
    """Return whether this machine does not refuse the run of these overrides."""
    try:
        config, command = compose(*overrides, "name=virtual")
        make_plan(config, resolve.detect_machine(config.cluster), command)
    except UserError:
        return False
    return True


def run(overrides: list[str], folder: Path) -> Record:
    """Return the record of a run that is compared with no reference."""
    config, command = compose(*overrides, f"results_dir={folder}", "name=virtual", "proof.reference=false")
    return execute_run(config, command)


def compare(draw: tuple[str, str]) -> Line:
    """Return the line of the output for one draw."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(KEYS, draw, strict=True)) | compare_runs(draw[1].split(), Path(folder))


def compare_runs(overrides: list[str], folder: Path) -> Line:
    """Return what a draw's real and virtual runs measured."""
    real = run(overrides, folder)
    line: Line = {name: real.row.get(name) for name in COLUMNS[1:7]}
    if real.status != "ok":
        return line | {"outcome": f"real {real.status}", "reason": real.row["reason"]}
    peaks = {rank.rank: rank.profiled.peak_without_backend_bytes or 0 for rank in real.ranks}
    if not any(peaks.values()):  # the timed steps are not like the profiled one, so that gloo's copies are not known
        line["reason"] = "the real peak has gloo's copies"
        peaks = {rank.rank: rank.peak_allocated_bytes or 0 for rank in real.ranks}
    rank = max(peaks, key=lambda number: peaks[number])
    virtual = run([*overrides, "launch=virtual", f"simulate.rank={rank}"], folder)
    if virtual.status != "ok":
        return line | {"rank": rank, "outcome": f"virtual {virtual.status}", "reason": virtual.row["reason"]}
    report, alone = next(entry for entry in real.ranks if entry.rank == rank), virtual.ranks[0]
    peak = virtual.row["peak_allocated_bytes"]
    return (
        line
        | {"rank": rank, "outcome": "compared", "peak_bytes": peaks[rank], "virtual_peak_bytes": peak}
        | {"peak_ratio": f"{peak / peaks[rank]:.5f}"}
        | {"bytes_sent": sent_bytes(report), "virtual_bytes_sent": sent_bytes(alone)}
        | {"flops": report.profiled.flops, "virtual_flops": alone.profiled.flops}
        | {"processor_seconds": processor_seconds(report), "virtual_processor_seconds": processor_seconds(alone)}
    )


def processor_seconds(rank: RankReport) -> str:
    """Return the processor time of a rank in a step, which other load on the machine changes less than time itself."""
    return f"{rank.host_usage.cpu_seconds / STEPS:.4f}"


def summarize(lines: list[Line]) -> None:
    """Print how many draws were compared, and how far virtual runs are from real ones."""
    compared = [line for line in lines if line["outcome"] == "compared"]
    print(f"{len(lines)} draws, {len(compared)} compared")
    for name, is_chosen in (("FSDP2", True), ("others", False)):
        group = [line for line in compared if is_fully_sharded(line) is is_chosen]
        errors = sorted((abs(float(line["peak_ratio"]) - 1), int(line["draw"])) for line in group)
        if errors:
            median, (worst, draw) = statistics.median(error for error, _ in errors), errors[-1]
            print(f"{name}: {len(group)} peaks, median {median:.4%}, worst {worst:.2%} (draw {draw})")
    for name in EXACT:
        differing = [line["draw"] for line in compared if float(line[name]) != float(line[f"virtual_{name}"])]
        print(f"{name}: {len(compared) - len(differing)} equal, others {differing}")
    timed = [line for line in compared if line.get("processor_seconds") not in (None, "")]
    ratios = [float(line["virtual_processor_seconds"]) / float(line["processor_seconds"]) for line in timed]
    if ratios:
        print(f"processor time: {statistics.median(ratios):.3f} x the real one in the median of {len(ratios)}")


def is_fully_sharded(line: Line) -> bool:
    """Return whether FSDP2 is the data parallelism of a draw."""
    return compose_config(*line["overrides"].split(), "name=virtual").strategy.data_parallel.startswith("fsdp")


def main() -> None:
    number = {"default": 2, "help": "draws of each strategy"}
    arguments = parse_options(__doc__, out=REQUIRED_PATH, per_strategy=number)
    draws = chosen_draws(arguments.per_strategy)
    try:
        complete_table(arguments.out, COLUMNS, KEYS, draws, compare, lambda line: line["outcome"] == "compared")
    finally:
        summarize(read_table(arguments.out))


if __name__ == "__main__":
    main()
