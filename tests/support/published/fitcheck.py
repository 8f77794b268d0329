"""fitcheck-llm's measured peaks of LoRA and QLoRA on one Tesla T4, planned as trainings of this project's own engine.

They are single steps of transformers and peft with recomputed layers, fp16 products and AdamW. peft keeps adapters in
fp32, and makes all that is not quantized fp32 beside a quantized base (peft/utils/other.py,
prepare_model_for_kbit_training): such rows are planned with precision=fp32. Scales are not quantized themselves. Qwen's
biases of queries, keys and values are left out. Sizes are the sources' own (`model_config`).
"""

from collections.abc import Iterator
from functools import cache

from harness.config.adapter import AdapterConfig
from harness.config.schema import CheckpointingConfig, PrecisionConfig
from harness.config.strategy import StrategyConfig
from harness.cost_model.memory import WORKSPACE_BYTES, estimate_memory
from harness.cost_model.rank_memory import rank_steps
from harness.engines.torch import state_widths
from harness.planner.search import backward_start_bytes
from tests.support.published import (
    DATA,
    PublishedRow,
    Values,
    numbered_rows,
    published_model,
    published_row,
    train_config,
)

FILE = "fitcheck_t4.csv"

# Hidden size, layers, heads, key-value heads, inner size and vocabulary, and whether the head is tied.
MODELS = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ((2048, 22, 32, 4, 5632, 32000), False),
    "HuggingFaceTB/SmolLM2-135M": ((576, 30, 9, 3, 1536, 49152), True),
    "HuggingFaceTB/SmolLM2-360M": ((960, 32, 15, 5, 2560, 49152), True),
    "HuggingFaceTB/SmolLM2-1.7B": ((2048, 24, 32, 32, 8192, 49152), True),
    "Qwen/Qwen2.5-1.5B-Instruct": ((1536, 28, 12, 2, 8960, 151936), True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": ((1536, 28, 12, 2, 8960, 151936), True),
    "Qwen/Qwen2.5-7B-Instruct": ((3584, 28, 28, 4, 18944, 152064), False),
    "meta-llama/Llama-3.2-1B-Instruct": ((2048, 16, 32, 8, 8192, 128256), True),
    "meta-llama/Llama-3.2-3B-Instruct": ((3072, 28, 24, 8, 8192, 128256), True),
    "mistralai/Mistral-7B-Instruct-v0.3": ((4096, 32, 32, 8, 14336, 32768), False),
    "deepseek-ai/deepseek-coder-1.3b-instruct": ((2048, 24, 16, 16, 5504, 32256), False),
}

FP32 = PrecisionConfig("fp32", "float32", master="float32", accumulate="float32", reduce="float32")
FP16_MIXED = PrecisionConfig("fp16_mixed", "float16", master="float32", accumulate="float32", reduce="float32")


@cache
def rows() -> tuple[PublishedRow, ...]:
    """Return all rows."""
    return tuple(_row(number, values) for number, values in numbered_rows(DATA / FILE))


def _row(number: int, values: Values) -> PublishedRow:
    sizes, is_tied = MODELS[values["model"]]
    is_quantized, batch = values["quantization"] == "nf4", int(values["batch_size"])
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = AdapterConfig("qlora" if is_quantized else "lora", int(values["lora_rank"]), 32, targets, False)
    attention = {"eager": "eager", "sdpa": "flash"}[values["attention"]]
    names = {"peak_allocated_mib": "peak_bytes", "packed_mib": "packed_bytes", "scales_mib": "scale_bytes"}
    return published_row(
        FILE,
        number,
        published_model(
            *(values["model"], "llama", sizes, is_tied, 4096, "config.json on huggingface.co"),
            adapter=adapter,
            attention=attention,
        ),
        StrategyConfig("single"),
        train_config(batch, batch, int(values["seq_len"])),
        cluster="gpu",
        stack="harness",
        world_size=1,
        gpus_per_node=1,
        precision=FP32 if is_quantized else FP16_MIXED,
        checkpointing=CheckpointingConfig("full"),
        measured={name: float(values[key]) * 2**20 for key, name in names.items() if values[key]},
    )


def planned_peaks(row: PublishedRow) -> tuple[int, int]:
    """Return the planned bytes of a row's peak: of this project's engine, and with the logits beside their loss.

    transformers returns its logits in the width of compute, so that they live through the backward of the loss.
    """
    config, layout, widths = row.config, row.layout, state_widths(row.config, row.layout)
    own = estimate_memory(config, layout, widths, "cuda").peak_bytes
    (step,) = rank_steps(config, layout, widths, "cuda")
    logits = config.train.global_batch * config.train.seq_len * config.model.vocab_size * config.precision.compute_bytes
    return own, max(own, backward_start_bytes(step) + WORKSPACE_BYTES + logits)


def lines() -> Iterator[dict[str, str]]:
    """Yield a line for each row: what was trained, measured and planned, in MiB, and planned over measured."""
    for row in rows():
        config, measured = row.config, row.measured["peak_bytes"]
        values = dict(numbered_rows(DATA / FILE))[row.row_number]
        own, with_logits = planned_peaks(row)
        yield {
            "source": f"{values['file']} {values['index']}",
            "model": config.model.name,
            "adapter": config.model.adapter.name,
            "attention": config.model.attention,
            "sequences": str(config.train.micro_batch),
            "seq_len": str(config.train.seq_len),
            "measured_mib": f"{measured / 2**20:.0f}",
            "planned_mib": f"{own / 2**20:.0f}",
            "planned_over_measured": f"{own / measured:.3f}",
            "with_logits_mib": f"{with_logits / 2**20:.0f}",
            "with_logits_over_measured": f"{with_logits / measured:.3f}",
        }
