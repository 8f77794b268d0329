"""The errors of plans on published measurements, beside those of other estimators, in one run.

python -m tests.benchmarks.planner_errors --llm-analysis ENVIRONMENT/bin/python --out results/planner
An environment with llm-analysis is made by: python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install llm-analysis
The planner's parameters were fitted to all groups of these sources but llm-foundry's of H100, Megatron-LM's and
fms-acceleration's: its errors on groups that were left out are printed by tests.benchmarks.fit_planner. The constant
MFU is the best one for a source in hindsight. Without --llm-analysis its lines of the last run are kept.
"""

import json
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.layout.model_profile import parameter_count
from tests.support.campaigns import REQUIRED_PATH, parse_options, read_table, write_table
from tests.support.published import (
    PublishedRow,
    fitcheck,
    fms,
    llm_foundry,
    megatron,
    modalities,
    nanotron,
    torchtitan,
    vtrain,
)
from tests.support.published.memory_scores import fms_peak, golden_memory, nanotron_memory
from tests.support.published.step_times import predicted_mfu, step_seconds, time_scores

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
        "torchtitan, A100 and H100": torchtitan.rows(),
        FMS: [case.row for case in fms.rows()],
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
        out=REQUIRED_PATH | {"help": "the folder to write the table into"},
    )
    table: Path = arguments.out / "errors.csv"
    lines: list[Line] = [*time_lines(arguments.llm_analysis), *memory_lines(arguments.llm_analysis)]
    if arguments.llm_analysis is None:
        lines += [line for line in read_table(table) if line["estimator"] == "llm-analysis"]
    write_table(table, FIELDS, lines)
    of_adapters = [*fitcheck.lines()]
    write_table(arguments.out / "adapters.csv", of_adapters[0], of_adapters)
    for entry in lines:
        print(f"{entry['source']:32} {entry['estimator']:26} {entry['figure']:32} {entry['value']}")


# --- other estimators of the same measurements


FLOPS_EFFICIENCY = 0.5  # what llm-analysis' documentation advises for Megatron-LM

# llm-analysis' own descriptions of devices; of A100 with 64 GB and H100 with 96 GB it has none.
LLM_ANALYSIS_GPUS = {
    "8xh100": "h100-sxm-80gb",
    "8xh100_96": "h100-sxm-80gb",
    "8xa100_80": "a100-sxm-80gb",
    "8xa100_40": "a100-sxm-40gb",
    "4xa100_64": "a100-sxm-80gb",
}


def ideal_seconds(row: PublishedRow) -> float:
    """Return the step time at the peak of all devices with the pipeline's bubble, which a constant MFU divides."""
    layout = row.layout
    bubble = 1 + (layout.pp - 1) / layout.grad_accumulation_steps(row.config.train)
    return predicted_mfu(row, 1.0) * bubble


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
        "gpu": LLM_ANALYSIS_GPUS[row.cluster],
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
    return json.loads(done.stdout)


def best_constant_mfu(rows: Sequence[PublishedRow]) -> float:
    """Return the constant MFU with the smallest error in the median of the logarithm."""
    return math.exp(median(math.log(ideal_seconds(row) / row.measured["step_seconds"]) for row in rows))


if __name__ == "__main__":
    main()
