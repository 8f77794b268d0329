"""Other estimates of the same measurements: llm-analysis, DeepSpeed's and Accelerate's functions, plain baselines."""

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.cost_model.flops import model_flops
from harness.hardware.machine import peak_flops
from harness.layout.model_profile import parameter_count
from tests.support.published import PublishedRow
from tests.support.published.step_times import row_hardware

FLOPS_EFFICIENCY = 0.5  # what llm-analysis' documentation advises for Megatron-LM

# llm-analysis' own descriptions of devices; of A100 with 64 GB it has none.
LLM_ANALYSIS_GPUS = {
    "8xh100": "h100-sxm-80gb",
    "8xa100_80": "a100-sxm-80gb",
    "8xa100_40": "a100-sxm-40gb",
    "4xa100_64": "a100-sxm-80gb",
}


def ideal_seconds(row: PublishedRow) -> float:
    """Return the step time at the peak of all devices with the pipeline's bubble, which a constant MFU divides."""
    hardware = row_hardware(row)
    peak = hardware.peak_flops or peak_flops(hardware.device_name, row.config.precision.compute)
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
    estimates: list[dict[str, float]] = json.loads(done.stdout)
    return estimates


def best_constant_mfu(rows: Sequence[PublishedRow]) -> float:
    """Return the constant MFU with the smallest error in the median of the logarithm."""
    return math.exp(median(math.log(ideal_seconds(row) / row.measured["step_seconds"]) for row in rows))
