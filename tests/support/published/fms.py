"""fms-acceleration's benchmarks on A100-80: peak bytes allocated by full fine-tuning on one GPU or under FSDP1.

The Trainer recomputes every layer (scripts/benchmarks/defaults.yaml: gradient_checkpointing). Weights are loaded in
the dtype of a row; under FSDP with mixed precision Accelerate makes them fp32. The length of packed sequences follows
from tokens and samples per second.
"""

import csv
import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionConfig
from harness.config.schema import ClusterConfig, DataConfig, RunConfig, TrainConfig
from harness.config.stack import StackConfig, load_stack
from harness.config.strategy import StrategyConfig
from harness.layout.layout import resolve_layout
from tests.support.published import DATA, PublishedRow

FILE = "fms_acceleration_a100.csv"

Values = dict[str, str]


def _model(name: str, family: str, sizes: tuple[int, ...], tied: bool, context: int) -> ModelConfig:
    hidden, layers, heads, groups, inner, vocabulary = sizes
    return ModelConfig(
        name,
        family=family,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        context_length=context,
        parameters=0,
        source="config.json on huggingface.co",
    )


# Sizes are those of each model's config.json: hidden, layers, heads, key-value heads, inner, vocabulary.
MODELS = {
    "bigcode/gpt_bigcode-santacoder": _model("santacoder", "gpt", (2048, 24, 16, 1, 8192, 49280), True, 2048),
    "mistralai/Mistral-7B-v0.1": _model("mistral_7b", "llama", (4096, 32, 32, 8, 14336, 32000), False, 4096),
    "ibm/PowerLM-3b": _model("powerlm_3b", "llama", (2304, 40, 36, 36, 9216, 49152), True, 4096),
    "meta-llama/Meta-Llama-3-8B": _model("llama_3_8b", "llama", (4096, 32, 32, 8, 14336, 128256), False, 4096),
    "NousResearch/Llama-2-70b-hf": _model("llama_2_70b", "llama", (8192, 80, 64, 8, 28672, 32000), False, 4096),
}


@dataclass(frozen=True)
class FmsRow:
    """A row, and the stack with the kernels that its framework configuration patches in."""

    row: PublishedRow
    stack: StackConfig


def exclusion(values: Values) -> str | None:
    """Return why a row is left out, or None."""
    if values["status"] != "ok":
        return "the run failed, and has no figures"
    if values["peft"]:
        return "adapters, which no layout here has"
    if values["model"] not in MODELS:
        return "mixture of experts or a hybrid, which no model here is"
    if not values["peak_torch_alloc_bytes"]:
        return "no allocated bytes are listed"
    if values["file"].endswith(("_pf.csv", "_mp.csv")):
        return "sequences are not packed: neither their lengths nor the padding is listed"
    return None


@lru_cache(maxsize=4)
def numbered_rows(path: Path = DATA / FILE) -> tuple[tuple[int, Values], ...]:
    """Return all rows of the file with their line numbers."""
    with path.open(newline="") as file:
        return tuple(enumerate(csv.DictReader(file), start=2))


def excluded_rows(path: Path = DATA / FILE) -> dict[str, int]:
    """Return how many rows are left out for each reason."""
    reasons = sorted(reason for _, values in numbered_rows(path) if (reason := exclusion(values)))
    return {reason: len(list(group)) for reason, group in groupby(reasons)}


@lru_cache(maxsize=4)
def rows(path: Path = DATA / FILE) -> tuple[FmsRow, ...]:
    """Return the rows of full fine-tuning that layouts of this project can express."""
    return tuple(_row(number, values) for number, values in numbered_rows(path) if exclusion(values) is None)


def _row(number: int, values: Values) -> FmsRow:
    gpus, micro_batch = int(values["num_gpus"]), int(float(values["per_device_batch"]))
    accumulation = int(float(values["grad_acc"] or 1))
    strategy = StrategyConfig(
        "fms", data_parallel="fsdp" if gpus > 1 else "none", zero_stage=3 if gpus > 1 else 0, dp_shard=gpus
    )
    config = RunConfig(
        MODELS[values["model"]],
        strategy,
        CheckpointingConfig("full"),
        _precision(values, gpus),
        DataConfig("synthetic", kind="synthetic"),
        ClusterConfig("8xa100_80", gpus_per_node=gpus),
        TrainConfig(
            global_batch=gpus * micro_batch * accumulation,
            micro_batch=micro_batch,
            seq_len=round(float(values["tokens_per_s"]) * gpus / float(values["samples_per_s"])),
            steps=100,
            warmup_steps=1,
            seed=0,
            lr=2e-5,
            weight_decay=0.01,
            betas=(0.9, 0.999),
            eps=1e-4,
            gradient_clipping=1.0,
        ),
        world_size=gpus,
    )
    row = PublishedRow(
        FILE,
        number,
        f"{config.model.name} on {gpus} GPUs",
        config,
        resolve_layout(strategy, gpus),
        "8xa100_80",
        1,
        gpus,
        "fms_acceleration",
        {
            "peak_bytes": float(values["peak_torch_alloc_bytes"]),
            "resting_bytes": float(values["torch_alloc_bytes"]),
            "reserved_bytes": float(values["mem_nvidia_reserved_mib"]) * 2**20,
        },
    )
    return FmsRow(row, _stack(values))


def _precision(values: Values, gpus: int) -> PrecisionConfig:
    """Return the precision: the model's dtype throughout, or fp32 shards under FSDP with mixed precision."""
    dtype = values["dtype"]
    if gpus > 1 and "True" in (values["bf16_flag"], values["fp16_flag"]):
        return PrecisionConfig("bf16_mixed", dtype, master="float32", accumulate="float32", reduce="float32")
    return PrecisionConfig("bf16", dtype, master=dtype, accumulate=dtype, reduce=dtype)


def _stack(values: Values) -> StackConfig:
    """Return the stack with the kernels of a row's framework configuration.

    The fast kernels (plugins/fused-ops-and-kernels, unsloth's) make norms and the cross-entropy one operator each, and
    Liger's make head and loss one. GPTBigCode computes its loss in the width of its logits.
    """
    stack = load_stack("fms_acceleration")
    changes: dict[str, int] = {}
    kernels = values["framework_config"]
    if "foak" in kernels:
        changes |= {"rms_norm_copies": 0, "fp32_logits": 2}
    if "liger" in kernels:
        changes |= {"fp32_logits": 0, "narrow_logits": 0}
    elif "gpt_bigcode" in values["model"]:
        changes |= {"fp32_logits": 0, "narrow_logits": 3}
    return dataclasses.replace(stack, memory=dataclasses.replace(stack.memory, **changes))
