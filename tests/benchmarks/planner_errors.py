"""The errors of plans on published measurements, beside those of other estimators, in one run.

python -m tests.benchmarks.planner_errors --llm-analysis ENVIRONMENT/bin/python --out results/planner/errors.csv
An environment with llm-analysis is made by: python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install llm-analysis
The planner's parameters of H100 nodes and of nanotron were fitted on the same grid as a whole: its errors on groups
that were left out of a fit are those of the tests. The constant MFU is the best one for these rows in hindsight.
"""

import argparse
import csv
import json
import math
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness.config.stack import load_stack
from harness.cost_model.flops import model_flops
from harness.cost_model.stack_memory import predict_memory
from harness.cost_model.timing.step_time import estimate_step_time
from harness.hardware.peak_flops import peak_flops
from harness.layout.parameters import parameter_count
from harness.runner.predicted_columns import described_devices
from tests.support.published import PublishedRow, fms, megatron, nanotron
from tests.support.published.memory_scores import nanotron_memory

H100 = "NVIDIA H100 80GB HBM3"

FLOPS_EFFICIENCY = 0.5  # what llm-analysis' documentation advises for Megatron-LM

CLEARLY_APART = 1.03  # the ratio of two measured step times from which on their order counts

DOMINATED = 0.1  # MFU below which nanotron's own transfers take most of a step, and times are not scored

Figures = dict[str, float | None]  # by estimator


def planned_step_seconds(row: PublishedRow) -> float:
    """Return the step time that the planner predicts."""
    timing = load_stack(row.stack).timing
    return estimate_step_time(
        row.config, row.layout, described_devices()[H100], timing, None, row.gpus_per_node
    ).step_seconds


def ideal_seconds(row: PublishedRow) -> float:
    """Return the step time at the peak of all devices with the pipeline's bubble, which a constant MFU divides."""
    peak = peak_flops(H100, "bfloat16")
    assert peak is not None
    layout = row.layout
    bubble = 1 + (layout.pp - 1) / layout.grad_accumulation_steps(row.config.train)
    return model_flops(row.config) / (layout.world_size * peak) * bubble


def sixteen_bytes(row: PublishedRow) -> float:
    """Return 16 bytes for each parameter that a device has, of which 12 are sharded from ZeRO's stage 1 on."""
    layout = row.layout
    shares = 2 / layout.shard_count("parameters") + 2 / layout.shard_count("gradients")
    return parameter_count(row.config.model) / layout.tp / layout.pp * (shares + 12 / layout.shard_count("optimizer"))


def deepspeed_estimate(row: PublishedRow) -> float:
    """Return what DeepSpeed's own functions estimate for stages 2 and 3, which is model state with a factor of 1.5."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    layout = row.layout
    parameters = parameter_count(row.config.model) // layout.tp // layout.pp
    if layout.zero_stage == 3:
        largest = row.config.model.hidden_size * row.config.model.vocab_size
        _, device, _ = estimate_zero3_model_states_mem_needs(parameters, largest, layout.dp, 1, cpu_offload=False)
    else:
        _, device = estimate_zero2_model_states_mem_needs(parameters, layout.dp, 1, cpu_offload=False)
    return float(device)


def accelerate_estimate(row: PublishedRow) -> float:
    """Return what `accelerate estimate-memory` prints for Adam in mixed precision; it knows no layouts."""
    from accelerate.commands.estimate import estimate_training_usage

    usage = estimate_training_usage(4 * parameter_count(row.config.model), "bfloat16")
    return float(max(usage.values()))


def llm_analysis_input(row: PublishedRow) -> dict[str, Any]:
    """Return a row in the terms of llm-analysis."""
    model, layout, train = row.config.model, row.layout, row.config.train
    return {
        "model": {
            "name": model.name,
            "num_layers": model.num_hidden_layers,
            "n_head": model.num_attention_heads,
            "hidden_dim": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_seq_len": train.seq_len,
            "num_key_value_heads": model.num_key_value_heads,
            "ffn_embed_dim": model.intermediate_size,
            "expansion_ratio": model.intermediate_size / model.hidden_size,
        },
        "gpu": "h100-sxm-80gb",
        "parallelism": {"tp_size": layout.tp, "pp_size": layout.pp, "dp_size": layout.dp},
        "flops_efficiency": FLOPS_EFFICIENCY,
        "training": {
            "batch_size_per_gpu": train.micro_batch,
            "gradient_accumulation_steps": layout.grad_accumulation_steps(train),
            "global_batch_size": train.global_batch,
            "seq_len": train.seq_len,
            "mlp_gated_linear_units": model.family == "llama",
        },
        "full_recomputation": row.config.checkpointing.name == "full",
        "zero_stage": layout.zero_stage,
    }


def llm_analysis_estimates(python: Path, rows: Sequence[PublishedRow]) -> list[dict[str, float]]:
    """Return the estimates of llm-analysis, which the given interpreter has installed."""
    script = Path(__file__).with_name("llm_analysis_estimates.py")
    given = json.dumps(list(map(llm_analysis_input, rows)))
    done = subprocess.run([python, script], input=given, capture_output=True, text=True, check=True)
    estimates: list[dict[str, float]] = json.loads(done.stdout)
    return estimates


def time_scores(rows: Sequence[PublishedRow], predicted: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield the median error of step times, the share of pairs in the right order, and the regret of the choice."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    errors = []
    for row, seconds in zip(rows, predicted, strict=True):
        measured = row.measured["step_seconds"]
        groups[row.group].append((seconds, measured))
        if row.measured["mfu"] >= DOMINATED:
            errors.append(abs(seconds / measured - 1))
    apart = [
        0.5 if first[0] == second[0] else float((first[0] < second[0]) == (first[1] < second[1]))
        for group in groups.values()
        for first, second in combinations(group, 2)
        if max(first[1], second[1]) > CLEARLY_APART * min(first[1], second[1])
    ]
    regrets = []
    for group in groups.values():
        lowest = min(predicted for predicted, _ in group)
        chosen = mean(measured for predicted, measured in group if predicted == lowest)  # any of equal ones may be
        regrets.append(chosen / min(measured for _, measured in group) - 1)
    yield "median error of the step time", median(errors)
    yield "pairs in the right order", mean(apart)
    yield "slowdown of the chosen layout", mean(regrets)


def memory_score(rows: Sequence[PublishedRow], predicted: Sequence[float]) -> tuple[str, float]:
    """Return the median error of peaks."""
    pairs = zip(rows, predicted, strict=True)
    return "median error of the peak", median(abs(size / row.measured["peak_bytes"] - 1) for row, size in pairs)


def best_constant_mfu(rows: Sequence[PublishedRow]) -> float:
    """Return the constant MFU with the smallest error in the median of the logarithm."""
    return math.exp(median(math.log(ideal_seconds(row) / row.measured["step_seconds"]) for row in rows))


def scores(python: Path | None) -> Iterator[dict[str, str | float]]:
    """Yield a line for every source, estimator and figure."""
    grid = [
        row for row in nanotron.rows() if row.status == "ok" and {"step_seconds", "peak_bytes"} <= row.measured.keys()
    ]
    mfu = best_constant_mfu(grid)
    times = {
        "harness plan": list(map(planned_step_seconds, grid)),
        "constant MFU with bubble": [ideal_seconds(row) / mfu for row in grid],
    }
    plain: dict[str, Callable[[PublishedRow], float]] = {
        "16 bytes a parameter": sixteen_bytes,
        "DeepSpeed's estimator": deepspeed_estimate,
        "Accelerate's estimator": accelerate_estimate,
    }
    golden, cases = megatron.rows(), fms.rows()
    memories: dict[str, tuple[list[PublishedRow], dict[str, list[float]]]] = {
        "nanotron grid, H100": (grid, {"harness plan": [nanotron_memory(row).reserved_bytes for row in grid]}),
        "Megatron-LM golden values": (
            [case.row for case in golden],
            {"harness plan": [_golden_peak(case) for case in golden]},
        ),
        "fms-acceleration, A100": (
            [case.row for case in cases],
            {
                "harness plan": [
                    predict_memory(case.row.config, case.row.layout, case.stack, None, 8).peak_bytes for case in cases
                ]
            },
        ),
    }
    if python is not None:
        estimates = llm_analysis_estimates(python, grid)
        times["llm-analysis"] = [estimate["step_seconds"] for estimate in estimates]
        memories["nanotron grid, H100"][1]["llm-analysis"] = [estimate["peak_bytes"] for estimate in estimates]
    for estimator, seconds in times.items():
        for figure, value in time_scores(grid, seconds):
            yield line("nanotron grid, H100", len(grid), estimator, figure, value)
    for source, (rows, predictions) in memories.items():
        predictions |= {name: list(map(estimate, rows)) for name, estimate in plain.items()}
        for estimator, sizes in predictions.items():
            yield line(source, len(rows), estimator, *memory_score(rows, sizes))


def _golden_peak(case: megatron.GoldenRow) -> float:
    from harness.cost_model.stack_memory import predict_rank_memory

    memory = predict_rank_memory(case.row.config, case.row.layout, case.stack, case.last_rank, case.compute_capability)
    return memory.estimate.peak_bytes


def line(source: str, rows: int, estimator: str, figure: str, value: float) -> dict[str, str | float]:
    """Return one line of the table."""
    return {"source": source, "rows": rows, "estimator": estimator, "figure": figure, "value": round(value, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llm-analysis", type=Path, help="the interpreter of an environment with llm-analysis")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file to write")
    arguments = parser.parse_args()
    lines = list(scores(arguments.llm_analysis))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    for entry in lines:
        print(f"{entry['source']:28} {entry['estimator']:26} {entry['figure']:32} {entry['value']}")


if __name__ == "__main__":
    main()
