"""The measurements that vTrain (arXiv 2312.12391) was validated with, as configurations and layouts.

They were taken with Megatron-DeepSpeed (data/README.md), one node and 64 nodes of 8 A100 each. The simulator's own
configurations of the same rows (config/validation) say what the tables do not: GPT's layers with a vocabulary of
50,257, every layer recomputed, 1F1B, gradients that are not reduced in buckets beside backward, and 800 Gbit/s between
nodes. The global batch is of all data-parallel ranks, and a row's micro-batches are what is left of it.
"""

from functools import cache

from harness.config.schema import CheckpointingConfig, PrecisionConfig
from harness.config.strategy import StrategyConfig
from tests.support.published import (
    DATA,
    PublishedRow,
    Values,
    numbered_rows,
    published_model,
    published_row,
    train_config,
)

SINGLE, MULTI = "vtrain_single.csv", "vtrain_multi.csv"
GPUS_PER_NODE = 8

VOCABULARY = 50_257
INTER_NODE_BANDWIDTH = 800e9 / 8 / GPUS_PER_NODE  # bytes per second of one GPU

# fp16 weights and gradients, which DeepSpeed accumulates and reduces as they are, over fp32 masters.
PRECISION = PrecisionConfig("fp16_mixed", compute="float16", master="float32", accumulate="float16", reduce="float16")


@cache
def single_node_rows() -> tuple[PublishedRow, ...]:
    """Return the rows of two to eight GPUs of a node."""
    return tuple(_row(SINGLE, *entry) for entry in numbered_rows(DATA / SINGLE))


@cache
def multi_node_rows() -> tuple[PublishedRow, ...]:
    """Return the rows of eight to 64 nodes."""
    return tuple(_row(MULTI, *entry) for entry in numbered_rows(DATA / MULTI))


def _row(source: str, number: int, values: Values) -> PublishedRow:
    gpus, seq_len = int(values["# GPUs"]), int(values["sequence length"])
    hidden, layers, heads = (int(values[key]) for key in ("hidden size", "# layers", "attention heads"))
    tp, dp, pp = (int(values[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    sizes = (hidden, layers, heads, heads, 4 * hidden, VOCABULARY)
    model = published_model(
        f"gpt_{hidden}x{layers}", "gpt", sizes, True, seq_len, source, attention="eager", dropout=0.1
    )
    strategy = StrategyConfig(
        "vtrain", data_parallel="ddp" if dp > 1 else "none", dp_replicate=dp, tp=tp, pp=pp, schedule="1f1b"
    )
    return published_row(
        source,
        number,
        model,
        strategy,
        train_config(int(values["global batch"]), int(values["micro batch"]), seq_len),
        cluster="8xa100_80",
        stack="megatron_deepspeed",
        world_size=gpus,
        gpus_per_node=GPUS_PER_NODE,
        precision=PRECISION,
        checkpointing=CheckpointingConfig("full"),
        measured={"step_seconds": float(values["iteration time (ms)"]) / 1000},
        hardware_changes={"inter_node_bandwidth": INTER_NODE_BANDWIDTH},
    )
