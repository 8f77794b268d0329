"""The step times of published rows by parameters that nothing of their own source was fitted to.

python -m tests.benchmarks.left_out --out results/planner/left_out.csv
For each source the fits of tests.benchmarks.fit_planner are repeated without its rows. A parameter that no other source
determines has the value that the planner has for what was never measured: a stack's default, or a device's of NEVER.
The sources of UNFITTED are in no fit, and are predicted by the parameters on file.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness.config.stack import StackTiming
from harness.cost_model.timing.interval import ENDS, Factors, changed_machine
from tests.benchmarks.fit_planner import FITS, START, Fit, fit, objective
from tests.support.campaigns import REQUIRED_PATH, parse_options, write_table
from tests.support.published import PublishedRow, fms, torchtitan
from tests.support.published.step_times import Parameter, row_hardware, row_timing, step_time

# The sources that are left out together: one campaign in two tables.
CAMPAIGNS = {
    name: name.partition(",")[0] if "vTrain" in name else name
    for fits in FITS.values()
    for one in fits
    for name in one.sources
}

# What cluster files have for devices without measurements of their own. The H100's shares for training are measured on
# one H200 (results/first_gpu/kernels.csv, attention.csv).
NEVER = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.367,
    "overlap_slowdown": 0.37,
    "launch_seconds": 1.7e-5,
    "inter_node_efficiency": 0.9,
    "inter_node_latency": 1.4e-5,
    "intra_node_latency": 6.0e-6,
}

UNFITTED = {
    "torchtitan, A100 and H100": torchtitan.rows,
    "fms-acceleration, A100": lambda: [case.row for case in fms.rows()],
}

AS_IT_IS = Factors(1.0, 1.0, 1.0)

FIELDS = (
    "source",
    "row",
    "gpus",
    "nodes",
    "group",
    "measured_seconds",
    "predicted_seconds",
    "low_seconds",
    "high_seconds",
)


def never_fitted(parameter: Parameter) -> float:
    """Return the value of a parameter that nothing determines."""
    return float(getattr(StackTiming(), parameter.name, NEVER.get(parameter.name, 0.0)))


def parameters_without(campaign: str, fits: Sequence[Fit]) -> dict[Parameter, float]:
    """Return the parameters of fits that follow each other, without the rows of a campaign.

    Where the device's own fit loses its only source, the next fit determines the device with the stack.
    """
    found: dict[Parameter, float] = {}
    waiting: list[Parameter] = []
    for one in fits:
        rows = {name: make() for name, make in one.sources.items() if CAMPAIGNS[name] != campaign}
        owners = {owner for each in rows.values() for row in each for owner in (row.cluster, row.stack)}
        wanted = [parameter for parameter in (*waiting, *one.parameters) if owners & set(parameter.owners)]
        waiting = [parameter for parameter in (*waiting, *one.parameters) if parameter not in wanted]
        found |= {parameter: never_fitted(parameter) for parameter in waiting}
        if wanted:
            start = {parameter: one.start.get(parameter.name, START[parameter.name]) for parameter in wanted}
            scores = [
                objective(each, {key: value for key, value in found.items() if key not in start}, one.whole_error)
                for each in rows.values()
            ]
            found |= fit(scores, start)
    return found


def line(source: str, row: PublishedRow, parameters: Mapping[Parameter, float]) -> dict[str, str | float]:
    """Return the line of a row."""
    machine = row_hardware(row, parameters), row_timing(row, parameters)
    predicted = [step_time(row, *changed_machine(*machine, factors)) for factors in (AS_IT_IS, *ENDS["apart"])]
    values = (source, row.row_number, row.layout.world_size, row.nodes, row.group, row.measured["step_seconds"])
    return dict(zip(FIELDS, (*values, *(round(time.step_seconds, 5) for time in predicted)), strict=True))


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each source the median error, the share of rows inside the interval, and its median half-width."""
    sources: dict[str, list[list[float]]] = defaultdict(list)
    for entry in lines:
        sources[entry["source"]].append([float(entry[field]) for field in FIELDS[-4:]])
    return {
        source: {
            "rows": len(rows),
            "error": median(abs(predicted / measured - 1) for measured, predicted, _, _ in rows),
            "inside": mean(low <= measured <= high for measured, _, low, high in rows),
            "half_width": median((high - low) / 2 / predicted for _, predicted, low, high in rows),
        }
        for source, rows in sources.items()
    }


def main() -> None:
    out: Path = parse_options(__doc__, out=REQUIRED_PATH).out
    lines = []
    for fits in FITS.values():
        for campaign in dict.fromkeys(CAMPAIGNS[source] for one in fits for source in one.sources):
            parameters = parameters_without(campaign, fits)
            print(
                campaign,
                {f"{key.owners[0]}.{key.name}": float(f"{value:.3g}") for key, value in parameters.items()},
                flush=True,
            )
            sources = {
                source: make for one in fits for source, make in one.sources.items() if CAMPAIGNS[source] == campaign
            }
            lines += [
                line(source, dataclasses.replace(row, timing_changes={}), parameters)
                for source, make in sources.items()
                for row in make()
            ]
    lines += [line(source, row, {}) for source, make in UNFITTED.items() for row in make()]
    write_table(out, FIELDS, lines)
    for source, figures in summary(lines).items():
        print(source, {name: round(value, 3) for name, value in figures.items()})


if __name__ == "__main__":
    main()
