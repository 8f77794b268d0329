"""The fit of the planner's parameters to published step times, and its errors on groups that were left out.

python -m tests.benchmarks.fit_planner a100                 prints the errors of five fits, each on half of the groups
python -m tests.benchmarks.fit_planner a100 --all-groups    prints the parameters fitted to all groups
A parameter is changed by steps that become smaller, one after the other, as long as the objective falls. The fits of a
name follow each other: what the first one says of the device holds for the next.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean

from tests.support.published import PublishedRow, llm_foundry, megatron, modalities, nanotron, vtrain
from tests.support.published.step_times import (
    CLEARLY_APART,
    Parameter,
    choices,
    regret,
    step_seconds,
    time_scores,
)

Parameters = dict[Parameter, float]

Rows = Callable[[], Sequence[PublishedRow]]

# The best rates of products that stas00/ml-engineering measured are 0.80 of the peak on H100 and 0.87 on A100; other
# shares are at most 1.
MOST = {"matmul_efficiency": 0.87, "attention_efficiency": 1.0, "inter_node_efficiency": 1.0}

# Where every fit starts: no figure of the rows is in these.
START = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.4,
    "inter_node_efficiency": 0.8,
    "inter_node_latency": 2e-5,
    "intra_node_latency": 4e-6,
    "overlap_slowdown": 0.3,
    "launch_seconds": 1.5e-5,
    "kernels_per_layer": 100.0,
    "layer_seconds": 5e-4,
    "micro_batch_seconds": 2e-3,
    "collective_launch_seconds": 1e-4,
    "collective_seconds_per_rank": 1e-5,
    "pipelined_collective_seconds_per_rank": 1e-4,
    "inter_node_step_seconds": 1e-4,
    "elementwise_traffic": 1.0,
    "logit_bytes": 28.0,
    "shard_slice_seconds": 1e-5,
    "optimizer_bytes": 30.0,
    "step_seconds": 0.02,
}

STEPS = (1.5, 1.2, 1.07, 1.02)

SEEDS = range(5)

A100 = ("8xa100_80", "8xa100_40", "4xa100_64")

SHARE_BEYOND = 0.05  # in which an error counts beyond a fit's `whole_error`


@dataclass(frozen=True)
class Fit:
    """The parameters that are fitted together, and the sources whose errors they make small, each as important."""

    sources: dict[str, Rows]
    parameters: tuple[Parameter, ...]
    start: Mapping[str, float] = field(default_factory=dict)  # by a parameter's name, where START does not suit
    whole_error: float = math.log(2)  # the logarithm of a row's error up to which it counts whole


def owned(owners: Iterable[str], *names: str) -> tuple[Parameter, ...]:
    """Return parameters that the same clusters or stacks share."""
    shared = tuple(owners)
    return tuple(Parameter(shared, name) for name in names)


def grid() -> list[PublishedRow]:
    """Return the rows of nanotron's grid that ran."""
    return [row for row in nanotron.rows() if row.status == "ok" and "step_seconds" in row.measured]


def golden() -> list[PublishedRow]:
    """Return the rows of Megatron-LM's golden values on devices with a description of their cluster."""
    rows = [case.row for case in megatron.rows() if "step_seconds" in case.row.measured]
    return [row for row in rows if row.cluster in ("8xa100_80", "8xh100")]


FITS: dict[str, tuple[Fit, ...]] = {
    "h100": (
        Fit(
            {"llm-foundry, H100": llm_foundry.h100_rows},
            owned(["8xh100"], "matmul_efficiency", "attention_efficiency", "overlap_slowdown"),
        ),
        Fit(
            {"nanotron": grid},
            (
                *owned(["8xh100"], "inter_node_efficiency"),
                *owned(["nanotron"], "collective_launch_seconds", "collective_seconds_per_rank"),
                *owned(["nanotron"], "pipelined_collective_seconds_per_rank", "inter_node_step_seconds"),
                *owned(["nanotron"], "optimizer_bytes", "shard_slice_seconds"),
            ),
            start={"optimizer_bytes": 100.0},  # the optimizer's step copies slice by slice
            # A third of the rows is of a campaign in which every transfer between nodes took half a second more.
            whole_error=0.25,
        ),
    ),
    "a100": (
        Fit(
            {"llm-foundry, A100": llm_foundry.rows, "Modalities": modalities.rows},
            (
                *owned(A100, "attention_efficiency"),
                *owned(["4xa100_64"], "inter_node_efficiency", "inter_node_latency", "intra_node_latency"),
            ),
        ),
        Fit(
            {"vTrain, one node": vtrain.single_node_rows, "vTrain, nodes": vtrain.multi_node_rows},
            (
                *owned(A100, "launch_seconds"),
                *owned(["8xa100_80"], "inter_node_efficiency"),
                *owned(["megatron_deepspeed"], "layer_seconds", "micro_batch_seconds", "collective_launch_seconds"),
                *owned(["megatron_deepspeed"], "collective_seconds_per_rank", "elementwise_traffic", "logit_bytes"),
                *owned(["megatron_deepspeed"], "optimizer_bytes", "step_seconds"),
            ),
            # Small models are bound by the host, and Megatron's kernels between products are partly fused.
            start={
                "layer_seconds": 1e-3,
                "elementwise_traffic": 0.6,
                "logit_bytes": 50.0,
                "collective_launch_seconds": 5e-5,
                "step_seconds": 2e-3,
            },
        ),
    ),
    "golden": (Fit({"Megatron-LM's golden values": golden}, owned(["megatron"], "kernels_per_layer")),),
}


def objective(rows: Sequence[PublishedRow], fixed: Parameters, whole_error: float) -> Callable[[Parameters], float]:
    """Return the function to minimize: errors of the logarithm, the share of pairs in the wrong order, and regrets.

    What an error exceeds `whole_error` by counts little.
    """
    measured = [row.measured["step_seconds"] for row in rows]
    groups = [group for group in choices(rows).values() if len(group) > 1]
    pairs = [
        (first, second) if measured[first] < measured[second] else (second, first)
        for group in groups
        for first, second in combinations(group, 2)
        if max(measured[first], measured[second]) > CLEARLY_APART * min(measured[first], measured[second])
    ]

    def value(parameters: Parameters) -> float:
        predicted = step_seconds(rows, fixed | parameters)
        errors = [abs(math.log(p / m)) for p, m in zip(predicted, measured, strict=True)]
        total = 2 * mean(error - (1 - SHARE_BEYOND) * max(0.0, error - whole_error) for error in errors)
        if pairs:
            total += 2 * mean(predicted[first] >= predicted[second] for first, second in pairs)
            total += 0.5 * mean(min(1.0, regret(group, predicted, measured)) for group in groups)
        return total

    return value


def fit(scores: Sequence[Callable[[Parameters], float]], start: Parameters) -> Parameters:
    """Return the parameters at which no step of one of them makes the mean of the scores smaller."""

    def total(parameters: Parameters) -> float:
        return mean(score(parameters) for score in scores)

    parameters = dict(start)
    lowest = total(parameters)
    for step in STEPS:
        improves = True
        while improves:
            improves = False
            for key in parameters:
                for factor in (step, 1 / step):
                    changed = parameters | {key: parameters[key] * factor}
                    if changed[key] > MOST.get(key.name, math.inf):
                        continue
                    reached = total(changed)
                    if reached < lowest - 1e-5:
                        lowest, parameters, improves = reached, changed, True
    return parameters


def fit_in_turn(fits: Iterable[Fit], select: Callable[[Sequence[PublishedRow]], Sequence[PublishedRow]]) -> Parameters:
    """Return the parameters of fits that follow each other, each to what `select` leaves of its sources' rows."""
    found: Parameters = {}
    for one in fits:
        scores = [objective(select(rows()), dict(found), one.whole_error) for rows in one.sources.values()]
        found |= fit(
            scores, {parameter: one.start.get(parameter.name, START[parameter.name]) for parameter in one.parameters}
        )
    return found


def fitted_groups(rows: Sequence[PublishedRow], seed: int) -> set[str]:
    """Return the half of the groups that a seed fits to."""
    groups = sorted({row.group for row in rows})
    random.Random(seed).shuffle(groups)
    return set(groups[: len(groups) // 2])


def held_out_scores(name: str, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of each source on the groups that a seed leaves out, after a fit to the others."""

    def fitted(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
        groups = fitted_groups(rows, seed)
        return [row for row in rows if row.group in groups]

    parameters = fit_in_turn(FITS[name], fitted)
    for one in FITS[name]:
        for source, rows in one.sources.items():
            groups = fitted_groups(rows(), seed)
            held_out = [row for row in rows() if row.group not in groups]
            yield source, dict(time_scores(held_out, step_seconds(held_out, parameters)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FITS)
    parser.add_argument("--all-groups", action="store_true")
    arguments = parser.parse_args()
    if not arguments.all_groups:
        for seed in SEEDS:
            for source, scores in held_out_scores(arguments.name, seed):
                print(seed, source, {figure: round(value, 4) for figure, value in scores.items()}, flush=True)
        return
    parameters = fit_in_turn(FITS[arguments.name], lambda rows: rows)
    for parameter, value in parameters.items():
        print(f"{', '.join(parameter.owners)}: {parameter.name}: {value:.3g}")
    for one in FITS[arguments.name]:
        for source, rows in one.sources.items():
            figures = time_scores(rows(), step_seconds(rows(), parameters))
            print(source, {figure: round(value, 4) for figure, value in figures})


if __name__ == "__main__":
    main()
