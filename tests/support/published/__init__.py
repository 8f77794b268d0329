"""Training measurements that others have published, as configurations and layouts of this project.

What the mappings of all sources have in common: rows of a file, and a row's configuration and layout.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.model import ModelConfig
from harness.config.schema import (
    CheckpointingConfig,
    ClusterConfig,
    DataConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from harness.config.stack import StackConfig
from harness.config.strategy import StrategyConfig
from harness.layout.layout import Layout, resolve_layout

DATA = Path(__file__).resolve().parents[2] / "data" / "published"

Values = dict[str, str]

# 16-bit weights, and masters, moments and gradients in fp32.
BF16_MIXED = PrecisionConfig("bf16_mixed", compute="bfloat16", master="float32", accumulate="float32", reduce="float32")


@dataclass(frozen=True)
class PublishedRow:
    """One measurement: what was trained, on what, and the figures that were published for it."""

    source: str  # the name of the file in tests/data/published
    row_number: int  # the line in that file, of which the header is line 1
    group: str  # the model and the number of devices; groups are fitted and reported as a whole
    config: RunConfig
    layout: Layout
    cluster: str  # the name of a file in conf/cluster
    nodes: int
    gpus_per_node: int  # of those that train
    stack: str  # the name of a file in conf/stack
    measured: Mapping[
        str, float
    ]  # by names with units, such as step_seconds; figures that were not published are missing
    status: str = "ok"  # how the run ended: ok, or as the source names it
    # figures of the cluster's hardware that were others where the row was measured, such as inter_node_bandwidth
    hardware_changes: Mapping[str, float] = field(default_factory=dict)
    timing_changes: Mapping[str, float] = field(default_factory=dict)  # the same of the stack's timing


class TunedRow(NamedTuple):
    """A row, and the stack as its flags or the kernels of its framework configuration change it."""

    row: PublishedRow
    stack: StackConfig
    compute_capability: int


@lru_cache(maxsize=8)
def numbered_rows(path: Path) -> tuple[tuple[int, Values], ...]:
    """Return all rows of a CSV file with their line numbers."""
    with path.open(newline="") as file:
        return tuple(enumerate(csv.DictReader(file), start=2))


def published_model(
    name: str, family: str, sizes: tuple[int, ...], tied: bool, context: int, source: str, **changes: Any
) -> ModelConfig:
    """Return a model of these sizes: hidden, layers, heads, key-value heads, inner size, vocabulary."""
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
        source=source,
        **changes,
    )


def train_config(global_batch: int, micro_batch: int, seq_len: int) -> TrainConfig:
    """Return the settings of a training whose memory and time depend on its batch alone."""
    return TrainConfig(
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq_len=seq_len,
        steps=50,
        warmup_steps=1,
        seed=0,
        lr=3e-4,
        weight_decay=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        gradient_clipping=1.0,
    )


def published_row(
    source: str,
    row_number: int,
    model: ModelConfig,
    strategy: StrategyConfig,
    train: TrainConfig,
    *,
    cluster: str,
    stack: str,
    world_size: int,
    gpus_per_node: int,
    measured: Mapping[str, float],
    group: str | None = None,
    precision: PrecisionConfig = BF16_MIXED,
    checkpointing: CheckpointingConfig | None = None,
    status: str = "ok",
    hardware_changes: Mapping[str, float] | None = None,
    timing_changes: Mapping[str, float] | None = None,
) -> PublishedRow:
    """Return a row with its configuration and layout; by default its group is the model on this number of GPUs."""
    nodes, in_node = max(1, world_size // gpus_per_node), min(world_size, gpus_per_node)
    config = RunConfig(
        model,
        strategy,
        checkpointing or CheckpointingConfig("none"),
        precision,
        DataConfig("synthetic", kind="synthetic"),
        ClusterConfig(cluster, nodes=nodes, gpus_per_node=in_node),
        train,
        world_size=world_size,
    )
    return PublishedRow(
        source,
        row_number,
        group or f"{model.name} on {world_size} GPUs",
        config,
        resolve_layout(strategy, world_size),
        cluster,
        nodes,
        in_node,
        stack,
        measured,
        status,
        hardware_changes or {},
        timing_changes or {},
    )
