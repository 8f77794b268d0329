"""The Ultra-Scale Playbook's grid of nanotron runs on 1 to 64 nodes of 8 x H100-80, as configurations and layouts.

The shapes, the tied head below 10,000 inner features, as many key-value as query heads, and sequence parallelism of
tensor-parallel ranks are from nanotron's scripts/scaling_benchmarks.py; the order of ranks (tensor innermost, pipeline
outermost, as in harness.layout.layout.AXES) is from nanotron's parallel/context.py.
"""

import csv
from functools import lru_cache

from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionConfig
from harness.config.schema import ClusterConfig, DataConfig, RunConfig, TrainConfig
from harness.config.strategy import StrategyConfig
from harness.layout.layout import resolve_layout
from tests.support.published import DATA, PublishedRow

FILE = "nanotron_h100_grid.csv"
GPUS_PER_NODE = 8

# bf16 weights, fp32 masters and moments, and gradients accumulated in fp32 (ACCUMULATE_GRAD_IN_FP32), in which they are
# also reduced (nanotron's optim/gradient_accumulator.py: the communication hook averages the fp32 buffers).
PRECISION = PrecisionConfig("bf16_mixed", compute="bfloat16", master="float32", accumulate="float32", reduce="float32")


@lru_cache(maxsize=1)
def rows() -> tuple[PublishedRow, ...]:
    """Return the rows of the grid; rows that failed have the status `failed`, and usually no figures.

    Rows that ask for more pipeline stages than there are layers are left out: a Layout has a layer in every stage.
    """
    with (DATA / FILE).open(newline="") as file:
        numbered = list(enumerate(csv.DictReader(file), start=2))
    return tuple(_row(number, values) for number, values in numbered if int(values["pp"]) <= int(values["layers"]))


def _row(number: int, values: dict[str, str]) -> PublishedRow:
    dp, tp, pp, zero = (int(values[key]) for key in ("dp", "tp", "pp", "zero"))
    micro_batch, grad_acc, gpus = int(values["mbs"]), int(values["grad_acc"]), int(values["gpus"])
    model = _model(values)
    strategy = StrategyConfig(
        "nanotron",
        data_parallel="ddp" if dp > 1 else "none",
        zero_stage=zero if dp > 1 else 0,
        dp_replicate=1 if zero else dp,
        dp_shard=dp if zero else 1,
        tp=tp,
        sequence_parallel=tp > 1,
        pp=pp,
        schedule="1f1b",
        layers_per_stage=layers_per_stage(model, pp) if pp > 1 else None,
    )
    nodes = max(1, gpus // GPUS_PER_NODE)
    config = RunConfig(
        model,
        strategy,
        CheckpointingConfig("none"),
        PRECISION,
        DataConfig("synthetic", kind="synthetic"),
        ClusterConfig("8xh100", nodes=nodes, gpus_per_node=GPUS_PER_NODE),
        TrainConfig(
            global_batch=dp * micro_batch * grad_acc,
            micro_batch=micro_batch,
            seq_len=int(values["seq"]),
            steps=5,
            warmup_steps=1,
            seed=0,
            lr=3e-4,
            weight_decay=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
            gradient_clipping=1.0,
        ),
        world_size=gpus,
    )
    return PublishedRow(
        FILE,
        number,
        f"{values['model_b']}B on {gpus} GPUs",
        config,
        resolve_layout(strategy, gpus),
        "8xh100",
        nodes,
        min(gpus, GPUS_PER_NODE),
        "nanotron",
        _measured(values, config),
        values["status"],
    )


def _measured(values: dict[str, str], config: RunConfig) -> dict[str, float]:
    """Return the figures of a row; a few failed rows have some."""
    measured = {}
    if values["tok_s"]:
        tokens = config.train.global_batch * config.train.seq_len
        measured |= {"step_seconds": tokens / float(values["tok_s"]), "mfu": float(values["mfu_pct"]) / 100}
    if values["mem_gb"]:
        measured["peak_bytes"] = float(values["mem_gb"]) * 2**30
    return measured


@lru_cache(maxsize=16)
def layers_per_stage(model: ModelConfig, pp: int) -> tuple[int, ...]:
    """Return the decoder layers of each stage as nanotron cuts them (models/base.py, build_model).

    A block belongs to the stage in which the cumulative cost of the blocks before it lies. The head costs its matrix,
    the embedding nothing. A last stage that has the head alone is given a layer of the one before, since every stage
    of a Layout has one.
    """
    layer = 4 * model.hidden_size**2 + 3 * model.intermediate_size * model.hidden_size
    total = model.num_hidden_layers * layer + model.vocab_size * model.hidden_size
    layers, stage = [0] * pp, 0
    for index in range(model.num_hidden_layers):
        layers[stage] += 1
        if (index + 1) * layer > total * (stage + 1) / pp:
            stage += 1
    while min(layers) < 1:
        layers[layers.index(0)] = 1
        layers[layers.index(max(layers))] -= 1
    return tuple(layers)


@lru_cache(maxsize=16)
def _model_of(
    hidden: int, layers: int, heads: int, inner: int, tied: bool, vocabulary: int, context: int
) -> ModelConfig:
    return ModelConfig(
        f"{hidden}x{layers}",
        family="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        context_length=context,
        parameters=0,
        source="nanotron's scripts/scaling_benchmarks.py",
    )


def _model(values: dict[str, str]) -> ModelConfig:
    sizes = (int(values[key]) for key in ("hidden", "layers", "heads", "ffn"))
    return _model_of(*sizes, values["tied"] == "1", int(values["vocab"]), int(values["seq"]))
