"""The estimates of llm-analysis (PyPI) for configurations on standard input, on standard output, as JSON.

It runs in an environment of its own, because llm-analysis needs old releases of other packages.
"""

import json
import logging
import sys
from typing import Any


def estimate(row: dict[str, Any]) -> dict[str, float]:
    """Return the step time in seconds and the bytes of one device that llm-analysis estimates."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name

    analysis = LLMAnalysis(
        ModelConfig(**row["model"]),
        get_gpu_config_by_name(row["gpu"]),
        get_dtype_config_by_name("w16a16e16"),
        ParallelismConfig(**row["parallelism"]),
        flops_efficiency=row["flops_efficiency"],
    )
    summary = analysis.training(
        **row["training"],
        activation_recomputation=ActivationRecomputation.FULL
        if row["full_recomputation"]
        else ActivationRecomputation.NONE,
        ds_zero=DSZeRO(row["zero_stage"]),
    )
    return {
        "step_seconds": summary["latency_per_iter"],
        "peak_bytes": summary["(weight+op_state+grad+act)_memory_per_gpu"],
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    json.dump([estimate(row) for row in json.load(sys.stdin)], sys.stdout)
