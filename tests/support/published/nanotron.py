"""The Ultra-Scale Playbook's grid of nanotron runs on 1 to 64 nodes of 8 x H100-80, as configurations and layouts.

The shapes, the tied head below 10,000 inner features, as many key-value as query heads, and sequence parallelism of
tensor-parallel ranks are from nanotron's scripts/scaling_benchmarks.py; the order of ranks (tensor innermost, pipeline
outermost, as in harness.config.strategy.AXES) is from nanotron's parallel/context.py. Weights are in bf16, masters and
moments in fp32, and so are the gradients that are accumulated (ACCUMULATE_GRAD_IN_FP32) and reduced (nanotron's
optim/gradient_accumulator.py: the communication hook averages the fp32 buffers).
"""

from functools import lru_cache

from harness.config.model import ModelConfig
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

FILE = "nanotron_h100_grid.csv"
GPUS_PER_NODE = 8


@lru_cache(maxsize=1)
def rows() -> tuple[PublishedRow, ...]:
    """Return the rows of the grid; rows that failed have the status `failed`, and usually no figures.

    Rows that ask for more pipeline stages than there are layers are left out: a Layout has a layer in every stage.
    """
    return tuple(
        _row(number, values)
        for number, values in numbered_rows(DATA / FILE)
        if int(values["pp"]) <= int(values["layers"])
    )


def _row(number: int, values: Values) -> PublishedRow:
    dp, tp, pp, zero = (int(values[key]) for key in ("dp", "tp", "pp", "zero"))
    micro_batch, grad_acc, gpus = int(values["mbs"]), int(values["grad_acc"]), int(values["gpus"])
    sizes = tuple(int(values[key]) for key in ("hidden", "layers", "heads", "heads", "ffn", "vocab"))
    name, source = f"{sizes[0]}x{sizes[1]}", "nanotron's scripts/scaling_benchmarks.py"
    model = published_model(name, "llama", sizes, values["tied"] == "1", int(values["seq"]), source)
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
    train = train_config(dp * micro_batch * grad_acc, micro_batch, int(values["seq"]))
    measured = {}  # a few failed rows have some figures
    if values["tok_s"]:
        tokens = train.global_batch * train.seq_len
        measured |= {"step_seconds": tokens / float(values["tok_s"]), "mfu": float(values["mfu_pct"]) / 100}
    if values["mem_gb"]:
        measured["peak_bytes"] = float(values["mem_gb"]) * 2**30
    return published_row(
        FILE,
        number,
        model,
        strategy,
        train,
        cluster="8xh100",
        stack="nanotron",
        world_size=gpus,
        gpus_per_node=GPUS_PER_NODE,
        measured=measured,
        group=f"{values['model_b']}B on {gpus} GPUs",
        status=values["status"],
    )


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
