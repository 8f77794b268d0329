"""fms-acceleration's benchmarks on A100-80: peaks and step times of full fine-tuning on one GPU or under FSDP1.

The Trainer recomputes every layer (scripts/benchmarks/defaults.yaml: gradient_checkpointing). Weights are loaded in
the dtype of a row; under FSDP with mixed precision Accelerate makes them fp32. The length of packed sequences follows
from tokens and samples per second.
"""

import dataclasses
from collections import Counter
from functools import cache

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, PrecisionConfig
from harness.config.stack import StackConfig, load_stack
from harness.config.strategy import StrategyConfig
from harness.cost_model.timing.step_time import COMPILED_TRAFFIC
from tests.support.published import (
    DATA,
    TunedRow,
    Values,
    numbered_rows,
    published_model,
    published_row,
    train_config,
)

FILE = "fms_acceleration_a100.csv"


def _model(name: str, family: str, sizes: tuple[int, ...], tied: bool, context: int) -> ModelConfig:
    return published_model(name, family, sizes, tied, context, "config.json on huggingface.co")


# Sizes are those of each model's config.json: hidden, layers, heads, key-value heads, inner, vocabulary.
MODELS = {
    "bigcode/gpt_bigcode-santacoder": _model("santacoder", "gpt", (2048, 24, 16, 1, 8192, 49280), True, 2048),
    "mistralai/Mistral-7B-v0.1": _model("mistral_7b", "llama", (4096, 32, 32, 8, 14336, 32000), False, 4096),
    "ibm/PowerLM-3b": _model("powerlm_3b", "llama", (2304, 40, 36, 36, 9216, 49152), True, 4096),
    "meta-llama/Meta-Llama-3-8B": _model("llama_3_8b", "llama", (4096, 32, 32, 8, 14336, 128256), False, 4096),
    "NousResearch/Llama-2-70b-hf": _model("llama_2_70b", "llama", (8192, 80, 64, 8, 28672, 32000), False, 4096),
}


def exclusion(values: Values) -> str | None:
    """Return why a row is left out, or None."""
    reasons = [
        (values["status"] != "ok", "the run failed, and has no figures"),
        (values["peft"], "adapters, which no layout here has"),
        (values["model"] not in MODELS, "mixture of experts or a hybrid, which no model here is"),
        (not values["peak_torch_alloc_bytes"], "no allocated bytes are listed"),
        (
            values["file"].endswith(("_pf.csv", "_mp.csv")),
            "sequences are not packed: neither their lengths nor the padding is listed",
        ),
    ]
    return next((reason for is_left_out, reason in reasons if is_left_out), None)


def excluded_rows() -> dict[str, int]:
    """Return how many rows are left out for each reason."""
    reasons = (exclusion(values) for _, values in numbered_rows(DATA / FILE))
    return dict(sorted(Counter(filter(None, reasons)).items()))


@cache
def rows() -> tuple[TunedRow, ...]:
    """Return the rows of full fine-tuning that layouts of this project can express."""
    return tuple(_row(number, values) for number, values in numbered_rows(DATA / FILE) if exclusion(values) is None)


def _row(number: int, values: Values) -> TunedRow:
    gpus, micro_batch = int(values["num_gpus"]), int(float(values["per_device_batch"]))
    accumulation = int(float(values["grad_acc"] or 1))
    strategy = StrategyConfig(
        "fms", data_parallel="fsdp" if gpus > 1 else "none", zero_stage=3 if gpus > 1 else 0, dp_shard=gpus
    )
    seq_len = round(float(values["tokens_per_s"]) * gpus / float(values["samples_per_s"]))
    row = published_row(
        FILE,
        number,
        MODELS[values["model"]],
        strategy,
        train_config(gpus * micro_batch * accumulation, micro_batch, seq_len),
        cluster="8xa100_80",
        stack="fms_acceleration",
        world_size=gpus,
        gpus_per_node=8,
        precision=_precision(values, gpus),
        checkpointing=CheckpointingConfig("full"),
        measured={
            "step_seconds": gpus * micro_batch * accumulation / float(values["samples_per_s"]),
            "peak_bytes": float(values["peak_torch_alloc_bytes"]),
            "resting_bytes": float(values["torch_alloc_bytes"]),
            "reserved_bytes": float(values["mem_nvidia_reserved_mib"]) * 2**20,
        },
        timing_changes={"elementwise_traffic": COMPILED_TRAFFIC} if _has_fast_kernels(values) else None,
    )
    return TunedRow(row, _stack(values), compute_capability=8)


def _precision(values: Values, gpus: int) -> PrecisionConfig:
    """Return the precision: the model's dtype throughout, or fp32 shards under FSDP with mixed precision."""
    dtype = values["dtype"]
    if gpus > 1 and "True" in (values["bf16_flag"], values["fp16_flag"]):
        return PrecisionConfig("bf16_mixed", dtype, master="float32", accumulate="float32", reduce="float32")
    return PrecisionConfig("bf16", dtype, master=dtype, accumulate=dtype, reduce=dtype)


def _has_fast_kernels(values: Values) -> bool:
    """Return whether norms, rotations and the cross-entropy are one kernel each, as a compiler would make them."""
    return "foak" in values["framework_config"]


def _stack(values: Values) -> StackConfig:
    """Return the stack with the kernels of a row's framework configuration.

    The fast kernels (plugins/fused-ops-and-kernels, unsloth's) make norms and the cross-entropy one operator each, and
    Liger's make head and loss one. GPTBigCode computes its loss in the width of its logits.
    """
    stack = load_stack("fms_acceleration")
    changes: dict[str, int] = {}
    kernels = values["framework_config"]
    if _has_fast_kernels(values):
        changes |= {"rms_norm_copies": 0, "fp32_logits": 2}
    if "liger" in kernels:
        changes |= {"fp32_logits": 0, "narrow_logits": 0}
    elif "gpt_bigcode" in values["model"]:
        changes |= {"fp32_logits": 0, "narrow_logits": 3}
    return dataclasses.replace(stack, memory=dataclasses.replace(stack.memory, **changes))
