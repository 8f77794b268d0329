"""torchtitan's rates of Llama under FSDP2 as configurations and layouts: tokens per second and reserved memory.

Rows in bf16 alone; those in Float8 have no precision here. Shapes are Llama's (arXiv 2307.09288, 2407.21783).
"Selective layer" recomputes every second layer, "selective op" keeps attention and every second matrix product.
Parameters and moments are in fp32, gathered in bf16 and reduced in fp32 (training.mixed_precision_param and _reduce).
The page of H100 says that its devices have 96 GB of HBM2e with 2.4 TB/s and a limit of 500 W.
"""

import dataclasses
from functools import cache

from harness.config.schema import CheckpointingConfig
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

FILE = "torchtitan.csv"
GPUS_PER_NODE = 8

CLUSTERS = {"h100_96gb": "8xh100_96", "a100_80gb": "8xa100_80"}

# Hidden size, layers, heads, key-value heads, inner size and vocabulary.
SHAPES = {
    "8b": (4096, 32, 32, 8, 14336, 128_256),
    "70b": (8192, 80, 64, 8, 28672, 128_256),
    "llama2_13b": (5120, 40, 40, 40, 13824, 32_000),
    "llama2_70b": (8192, 80, 64, 8, 28672, 32_000),
}

CHECKPOINTINGS = {
    "none": CheckpointingConfig("none"),
    "full": CheckpointingConfig("full"),
    "selective layer": CheckpointingConfig("every_n", every=2),
    "selective op": CheckpointingConfig("selective", saved_products="every_second"),
}


@cache
def rows() -> tuple[PublishedRow, ...]:
    """Return all rows."""
    return tuple(_row(number, values) for number, values in numbered_rows(DATA / FILE))


def _row(number: int, values: Values) -> PublishedRow:
    name, gpus, seq_len = values["model"], int(values["gpus"]), int(values["seq_len"])
    micro_batch, rate = int(values["local_batch"]), float(values["tokens_per_second_per_gpu"])
    measured = {"step_seconds": micro_batch * seq_len / rate}
    if values["reserved_gib"]:
        measured["reserved_bytes"] = float(values["reserved_gib"]) * 2**30
    train = train_config(gpus * micro_batch, micro_batch, seq_len)
    return published_row(
        FILE,
        number,
        published_model(name, "llama", SHAPES[name], False, seq_len, "torchtitan/models/llama3"),
        StrategyConfig("torchtitan", data_parallel="fsdp", zero_stage=3, dp_shard=gpus),
        dataclasses.replace(train, compile=values["compile"] == "True"),
        cluster=CLUSTERS[values["device"]],
        stack="torchtitan",
        world_size=gpus,
        gpus_per_node=GPUS_PER_NODE,
        checkpointing=CHECKPOINTINGS[values["checkpointing"]],
        measured=measured,
    )
