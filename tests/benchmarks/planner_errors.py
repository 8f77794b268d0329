"""The errors of plans on published measurements, beside those of other estimators, in one run.

python -m tests.benchmarks.planner_errors --llm-analysis ENVIRONMENT/bin/python --out results/planner
An environment with llm-analysis is made by: python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install llm-analysis
The planner's parameters were fitted to all groups of these sources but llm-foundry's of H100, Megatron-LM's and
fms-acceleration's: its errors on groups that were left out are printed by tests.benchmarks.fit_planner. The constant
MFU is the best one for a source in hindsight. Without --llm-analysis its lines of the last run are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks.other_estimators import (
    accelerate_estimate,
    best_constant_mfu,
    deepspeed_estimate,
    ideal_seconds,
    llm_analysis_estimates,
    sixteen_bytes,
)
from tests.benchmarks.planner_pictures import write_pictures
from tests.support.campaigns import REQUIRED_PATH, parse_options, read_table, write_table
from tests.support.published import PublishedRow, fms, llm_foundry, megatron, modalities, nanotron, vtrain
from tests.support.published.memory_scores import fms_peak, golden_memory, nanotron_memory
from tests.support.published.step_times import step_seconds, time_scores

NANOTRON, MEGATRON, FMS = "nanotron grid, H100", "Megatron-LM golden values", "fms-acceleration, A100"

FIELDS = ("source", "rows", "estimator", "figure", "value")

Line = dict[str, str | float]


def timed_rows() -> dict[str, Sequence[PublishedRow]]:
    """Return the rows with step times, by source; nothing was fitted to Megatron-LM's and llm-foundry's of H100."""
    grid = [
        row for row in nanotron.rows() if row.status == "ok" and {"step_seconds", "peak_bytes"} <= row.measured.keys()
    ]
    golden = [case.row for case in megatron.rows() if "step_seconds" in case.row.measured]
    return {
        NANOTRON: grid,
        "llm-foundry, A100": llm_foundry.rows(),
        "llm-foundry, H100": llm_foundry.h100_rows(),
        "Modalities, A100 of 64 GB": modalities.rows(),
        "vTrain's data, one node of A100": vtrain.single_node_rows(),
        "vTrain's data, nodes of A100": vtrain.multi_node_rows(),
        MEGATRON: [row for row in golden if row.cluster in ("8xa100_80", "8xh100")],
    }


def time_lines(python: Path | None) -> Iterator[Line]:
    """Yield a line for every source, estimator and figure of step times."""
    for source, rows in timed_rows().items():
        mfu = best_constant_mfu(rows)
        times = {
            "harness plan": step_seconds(rows),
            "constant MFU with bubble": [ideal_seconds(row) / mfu for row in rows],
        }
        if python is not None and source != MEGATRON:  # which trains shapes that llm-analysis refuses
            times["llm-analysis"] = [estimate["step_seconds"] for estimate in llm_analysis_estimates(python, rows)]
        for estimator, seconds in times.items():
            for figure, value in time_scores(rows, seconds):
                yield line(source, len(rows), estimator, figure, value)


def memory_rows() -> dict[str, tuple[Sequence[PublishedRow], list[float]]]:
    """Return the rows with peaks and what the planner predicts of these, by source."""
    grid, golden, cases = timed_rows()[NANOTRON], megatron.rows(), fms.rows()
    return {
        NANOTRON: (grid, [nanotron_memory(row).reserved_bytes for row in grid]),
        MEGATRON: ([case.row for case in golden], [golden_memory(case).estimate.peak_bytes for case in golden]),
        FMS: ([case.row for case in cases], [fms_peak(case) for case in cases]),
    }


def memory_lines(python: Path | None) -> Iterator[Line]:
    """Yield a line for every source and estimator of peaks."""
    plain: dict[str, Callable[[PublishedRow], float]] = {
        "16 bytes a parameter": sixteen_bytes,
        "DeepSpeed's estimator": deepspeed_estimate,
        "Accelerate's estimator": accelerate_estimate,
    }
    for source, (rows, predicted) in memory_rows().items():
        sizes = {"harness plan": predicted} | {name: list(map(estimate, rows)) for name, estimate in plain.items()}
        if python is not None and source == NANOTRON:
            sizes["llm-analysis"] = [estimate["peak_bytes"] for estimate in llm_analysis_estimates(python, rows)]
        for estimator, values in sizes.items():
            errors = [abs(size / row.measured["peak_bytes"] - 1) for row, size in zip(rows, values, strict=True)]
            yield line(source, len(rows), estimator, "median error of the peak", median(errors))


def line(source: str, rows: int, estimator: str, figure: str, value: float) -> Line:
    """Return one line of the table."""
    return dict(zip(FIELDS, (source, rows, estimator, figure, round(value, 4)), strict=True))


def main() -> None:
    arguments = parse_options(
        __doc__,
        llm_analysis={"type": Path, "help": "the interpreter of an environment with llm-analysis"},
        out=REQUIRED_PATH | {"help": "the folder to write the table and the pictures into"},
    )
    table: Path = arguments.out / "errors.csv"
    lines: list[Line] = [*time_lines(arguments.llm_analysis), *memory_lines(arguments.llm_analysis)]
    if arguments.llm_analysis is None:
        lines += [line for line in read_table(table) if line["estimator"] == "llm-analysis"]
    write_table(table, FIELDS, lines)
    for entry in lines:
        print(f"{entry['source']:32} {entry['estimator']:26} {entry['figure']:32} {entry['value']}")
    seconds = {source: (rows, step_seconds(rows)) for source, rows in timed_rows().items()}
    write_pictures(arguments.out, seconds, memory_rows())


if __name__ == "__main__":
    main()
