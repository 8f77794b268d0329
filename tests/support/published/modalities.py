"""Modalities' scaling experiments on Leonardo as configurations and layouts: samples per second under FSDP1.

The table names models by their size. Operations per token, which follow from MFU and samples per second, are those of
12 x layers x hidden_size^2 parameters and 12 x layers x hidden_size x seq_len for attention with GPT-3's shapes (arXiv
2005.14165, table 2.1) of 2.7, 6.7 and 13 billion parameters, within 0.1 %, and of 52 layers of 6,656 for 28 billion.
The vocabulary of 50,304 is that of the repository's configurations. Precision BF_16 gathers and reduces in 16 bit
(src/modalities/running_env/env_utils.py). HYBRID_SHARD shards in a node and replicates between nodes.
"""

import dataclasses
from functools import cache

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

FILE = "modalities_fsdp_a100.csv"
GPUS_PER_NODE = 4

VOCABULARY = 50_304

# Hidden size, layers and heads by the billions of parameters.
SHAPES = {"2.7": (2560, 32, 32), "6.7": (4096, 32, 32), "13.0": (5120, 40, 40), "28.0": (6656, 52, 52)}


@cache
def rows() -> tuple[PublishedRow, ...]:
    """Return all rows."""
    return tuple(_row(number, values) for number, values in numbered_rows(DATA / FILE))


def _row(number: int, values: Values) -> PublishedRow:
    size, gpus, seq_len = values["No. Parameters (B)"], int(values["GPUs"]), int(values["Sequence Length"])
    hidden, layers, heads = SHAPES[size]
    global_batch = int(values["GBS"])
    in_node = min(gpus, GPUS_PER_NODE) if values["Sharding"] == "HYBRID_SHARD" else gpus
    sizes = (hidden, layers, heads, heads, 4 * hidden, VOCABULARY)
    return published_row(
        FILE,
        number,
        published_model(f"gpt_{size}b", "gpt", sizes, False, seq_len, "arXiv 2005.14165, table 2.1"),
        StrategyConfig(
            "modalities", data_parallel="fsdp", zero_stage=3, dp_shard=in_node, dp_replicate=gpus // in_node
        ),
        train_config(global_batch, int(values["MBS"]), seq_len),
        cluster="4xa100_64",
        stack="modalities",
        world_size=gpus,
        gpus_per_node=GPUS_PER_NODE,
        precision=dataclasses.replace(BF16_MIXED, reduce="bfloat16"),
        checkpointing=CheckpointingConfig("full" if values["AC"] == "True" else "none"),
        measured={"step_seconds": global_batch / float(values["Samples/s"]), "mfu": float(values["MFU"])},
    )
