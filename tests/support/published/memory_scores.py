"""How far the planner's memory predictions are from published measurements: the figures of the bars, by name."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import mean, median

import pandas as pd

from harness.config.stack import StackConfig, load_stack
from harness.cost_model.fits import fit_verdict
from harness.cost_model.stack_memory import RankMemory, predict_highest_rank
from tests.support.commands import ROOT
from tests.support.published import PublishedRow, TunedRow, fms, megatron, nanotron
from tests.support.rank_memory import predict_rank_memory

SEEDS = (0, 1, 2, 3, 4)

# The share of ratios inside a range, where it is not 94 %: the errors of this project's runs are nearly all the same,
# so that a narrower range depends on which few of the others it has.
SHARES = {"harness": 0.96}

H100_BYTES = 80 * 10**9  # as its name says; the device has a little more, of which a context takes a part

FRAGMENTATIONS = tuple(step / 100 for step in range(0, 36, 4))  # the values among which the only fitted one is searched


def error(predicted: float, measured: float) -> float:
    """Return by how much a prediction is off, in units of the measurement."""
    return abs(predicted / measured - 1)


def golden_memory(golden: TunedRow) -> RankMemory:
    """Return the memory of the last rank of the pipeline, which a golden value is of."""
    row = golden.row
    return predict_rank_memory(row.config, row.layout, golden.stack, row.layout.pp - 1, golden.compute_capability)


def fms_peak(case: TunedRow) -> int:
    """Return the peak of a row of fms-acceleration's benchmarks on A100."""
    return predict_highest_rank(case.row.config, case.row.layout, *case[1:]).estimate.peak_bytes


def megatron_scores() -> dict[str, float]:
    """Return the median errors of Megatron-LM's golden values, which are of the last rank; nothing is fitted."""
    pairs = [(golden.row.measured, golden_memory(golden)) for golden in megatron.rows()]
    resting = [error(memory.resting_bytes, measured["resting_bytes"]) for measured, memory in pairs]
    peaks = [error(memory.estimate.peak_bytes, measured["peak_bytes"]) for measured, memory in pairs]
    return {
        "megatron_rows": len(pairs),
        "megatron_resting_median": median(resting),
        "megatron_peak_median": median(peaks),
    }


def fms_scores() -> dict[str, float]:
    """Return the errors of the peaks of fms-acceleration's benchmarks; nothing is fitted."""
    errors = [error(fms_peak(case), case.row.measured["peak_bytes"]) for case in fms.rows()]
    return {"fms_rows": len(errors), "fms_peak_median": median(errors), "fms_peak_worst": max(errors)}


def nanotron_memory(row: PublishedRow, fragmentation: float | None = None) -> RankMemory:
    """Return the memory of the first rank, whose figures nanotron writes (src/nanotron/helpers.py, log_throughput).

    The stack cuts the layers itself, since nanotron may leave the last stages without one.
    """
    stack = load_stack_with(fragmentation)
    return predict_rank_memory(row.config, dataclasses.replace(row.layout, layers_per_stage=None), stack, 0)


@lru_cache(maxsize=64)
def load_stack_with(fragmentation: float | None) -> StackConfig:
    """Return nanotron's stack with this share of fragmentation, by default its own."""
    stack = load_stack("nanotron")
    if fragmentation is None:
        return stack
    return dataclasses.replace(stack, memory=dataclasses.replace(stack.memory, fragmentation=fragmentation))


@lru_cache(maxsize=1)
def nanotron_rows() -> tuple[PublishedRow, ...]:
    """Return the rows of nanotron's grid that ran and have a figure of memory."""
    return tuple(row for row in nanotron.rows() if row.status == "ok" and "peak_bytes" in row.measured)


def held_out_median(rows: Sequence[PublishedRow], predict: Callable[[PublishedRow, float], float], seed: int) -> float:
    """Return the median error on one half of the groups with the fragmentation that suits the other half best."""
    groups = sorted({row.group for row in rows})
    random.Random(seed).shuffle(groups)
    fitted = set(groups[: len(groups) // 2])

    def score(fragmentation: float, inside: bool) -> float:
        chosen = [row for row in rows if (row.group in fitted) == inside]
        return median(error(predict(row, fragmentation), row.measured["peak_bytes"]) for row in chosen)

    return score(min(FRAGMENTATIONS, key=lambda value: score(value, inside=True)), inside=False)


def nanotron_scores() -> dict[str, float]:
    """Return the errors of nanotron's reserved bytes, the worst of five halves held out, and the verdicts.

    The verdict of a row is that of harness.cost_model.fits on a device of 80 GB.
    """
    rows = nanotron_rows()
    predicted = {
        (row.row_number, value): nanotron_memory(row, value).reserved_bytes for row in rows for value in FRAGMENTATIONS
    }
    worst = max(held_out_median(rows, lambda row, value: predicted[row.row_number, value], seed) for seed in SEEDS)
    crashed = [nanotron_memory(row) for row in nanotron.rows() if row.status != "ok"]
    states = [memory for memory in crashed if state_bytes(memory) > H100_BYTES]
    return {
        "nanotron_rows": len(rows),
        "nanotron_memory_held_out": worst,
        "nanotron_no_of_ran": sum(map(exceeds, map(nanotron_memory, rows))) / len(rows),
        "nanotron_states_too_large": len(states),
        "nanotron_no_of_states_too_large": sum(map(exceeds, states)) / max(1, len(states)),
    }


def state_bytes(memory: RankMemory) -> int:
    """Return the bytes of parameters, gradients and optimizer state."""
    estimate = memory.estimate
    return estimate.parameter_bytes + estimate.gradient_bytes + estimate.optimizer_bytes


def exceeds(memory: RankMemory) -> bool:
    """Return whether a rank of nanotron's is said not to fit an H100."""
    return fit_verdict(memory, H100_BYTES, load_stack_with(None).memory).fits == "no"


@lru_cache(maxsize=1)
def measured_ratios() -> dict[str, tuple[tuple[str, float], ...]]:
    """Return the group and measured over predicted peak bytes of every row, by stack."""
    golden = ((case.row, golden_memory(case).estimate.peak_bytes) for case in megatron.rows())
    tuned = ((case.row, fms_peak(case)) for case in fms.rows())
    grid = ((row, nanotron_memory(row).reserved_bytes) for row in nanotron_rows())
    return {
        name: tuple((row.group, row.measured["peak_bytes"] / predicted) for row, predicted in pairs)
        for name, pairs in (("megatron", golden), ("fms_acceleration", tuned), ("nanotron", grid))
    }


def own_ratios() -> tuple[tuple[str, float], ...]:
    """Return the draw and measured over predicted peak bytes of every random run of this project on file."""
    return ratios_of("random_runs.csv")


def ratios_of(table: str) -> tuple[tuple[str, float], ...]:
    """Return the draw and measured over predicted peak bytes of every proven run of a table of results."""
    runs = pd.read_csv(ROOT / "results" / table, dtype={"draw": str})
    runs = runs.query("status == 'ok' and predicted_peak_bytes > 0")
    return tuple(zip(runs.draw, runs.peak_allocated_bytes / runs.predicted_peak_bytes, strict=True))


def interval(ratios: Sequence[float], inside: float = 0.94) -> tuple[float, float]:
    """Return the narrowest range with this share of the ratios in it."""
    ordered = sorted(ratios)
    ranges = zip(ordered, ordered[math.ceil(len(ordered) * inside) - 1 :], strict=False)
    return min(ranges, key=lambda bounds: bounds[1] / bounds[0])


def interval_scores() -> dict[str, float]:
    """Return the shares of held-out rows inside the intervals of the other half of the groups, and their half-widths.

    They are those of the published measurements, of this project's random runs, and of all.
    """
    own = {"harness": own_ratios()}
    return (
        half_scores(measured_ratios(), "memory")
        | half_scores(own, "memory_of_own_runs")
        | half_scores(measured_ratios() | own, "memory_of_all")
    )


def half_scores(ratios: Mapping[str, Sequence[tuple[str, float]]], name: str) -> dict[str, float]:
    """Return the share of held-out rows inside the intervals of the other half of the groups, and their half-widths.

    The share is the lowest one of five halves, over the rows of all stacks. The half-widths' median is taken over
    groups of rows, since the stacks have unequal numbers of rows in a group.
    """
    shares, widths = [], []
    for seed in SEEDS:
        inside: list[bool] = []
        for stack, pairs in ratios.items():
            groups = sorted({group for group, _ in pairs})
            random.Random(seed).shuffle(groups)
            fitted = set(groups[: len(groups) // 2])
            low, high = interval([ratio for group, ratio in pairs if group in fitted], SHARES.get(stack, 0.94))
            inside += [low <= ratio <= high for group, ratio in pairs if group not in fitted]
            widths += [(high - low) / 2] * (len(groups) - len(fitted))
        shares.append(mean(inside))
    return {f"{name}_inside_held_out": min(shares), f"{name}_half_width_median_of_groups": median(widths)}
