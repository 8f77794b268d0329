"""llm-foundry's MPT benchmarks under FSDP1 as configurations and layouts: tokens per second on A100 and H100.

Sizes are those of scripts/train/yamls/pretrain: learned positions, biases, LayerNorm and a tied head, as the table's
number of parameters confirms. MP mode PURE reduces gradients in 16 bit, DEFAULT in fp32, and the shards are in fp32 in
both (Composer's composer/distributed/mosaic_parallelism.py, get_mixed_precision). All layers are recomputed where the
table says so. Nodes of A100 are connected with 1,600 Gbit/s, as those of 8xa100_80.yaml are.
"""

import dataclasses
from functools import lru_cache
from pathlib import Path

from harness.config.schema import CheckpointingConfig
from harness.config.strategy import StrategyConfig
from tests.support.published import (
    BF16_MIXED,
    DATA,
    PublishedRow,
    Values,
    numbered_rows,
    published_model,
    published_row,
    train_config,
)

FILE, H100_FILE = "llm_foundry_mpt_a100.csv", "llm_foundry_mpt_h100.csv"
GPUS_PER_NODE = 8

CLUSTERS = {"a100_40gb": "8xa100_40", "a100_80gb": "8xa100_80", "h100_80gb": "8xh100"}

# torch.distributed.fsdp.ShardingStrategy and the stage of ZeRO that it is.
ZERO_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}


@lru_cache(maxsize=4)
def rows(path: Path = DATA / FILE) -> tuple[PublishedRow, ...]:
    """Return the rows in 16 bit; FP8 is no precision here."""
    return tuple(
        _row(path.name, number, values) for number, values in numbered_rows(path) if "fp8" not in values["Precision"]
    )


def h100_rows() -> tuple[PublishedRow, ...]:
    """Return the rows of H100, to which nothing was fitted."""
    return rows(DATA / H100_FILE)


def _row(source: str, number: int, values: Values) -> PublishedRow:
    gpus, micro_batch, seq_len = int(values["# GPUs"]), int(values["MicroBatchSize"]), int(values["SeqLen (T)"])
    hidden, layers, heads = (int(values[key]) for key in ("d_model", "n_layers", "n_heads"))
    inner = int(values["expansion"]) * hidden
    sizes = (hidden, layers, heads, heads, inner, int(values["vocab"]))
    global_batch = int(values["GlobalBatchSize"])
    reduced = "bfloat16" if values["MP Mode"] == "PURE" else "float32"
    return published_row(
        source,
        number,
        published_model(f"mpt_{values['Model']}", "gpt", sizes, True, seq_len, "llm-foundry scripts/train/yamls"),
        StrategyConfig(
            "llm_foundry", data_parallel="fsdp", zero_stage=ZERO_STAGES[values["Sharding Strategy"]], dp_shard=gpus
        ),
        train_config(global_batch, micro_batch, seq_len),
        cluster=CLUSTERS[values["GPU"]],
        stack="llm_foundry",
        world_size=gpus,
        gpus_per_node=GPUS_PER_NODE,
        group=f"mpt_{values['Model']} on {gpus} {values['GPU']}",
        precision=dataclasses.replace(BF16_MIXED, reduce=reduced),
        checkpointing=CheckpointingConfig("full" if values["Activation Checkpointing"] == "True" else "none"),
        measured={
            "step_seconds": global_batch * seq_len / (float(values["Throughput (T/s/GPU)"]) * gpus),
            "mfu": float(values["MFU"]) / 100,
        },
    )
