"""Published trainings of mixtures of experts in 16 bit whose attention this project has.

Megatron-Bridge's (docs/performance-summary-archive.md) force equal loads; each node is the part of an NVL72 rack that
takes part, and its GB200 and GB300 are planned as B200. Stages have equal layers, but for one more in the first ones.
fms-acceleration's (scripts/benchmarks/refs) are full fine-tuning in bf16 throughout. Their padding-free micro-batches
have eight sequences of the mean length that follows from tokens and samples per second; Mixtral's have one.
"""

from collections.abc import Sequence
from functools import cache

import yaml

from harness.config.from_dict import from_dict
from harness.config.locations import files_in
from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, PrecisionConfig
from harness.config.stack import load_stack
from harness.config.strategy import StrategyConfig
from harness.cost_model.stack_memory import predict_highest_rank
from harness.cost_model.timing.interval import ENDS, changed_machine
from harness.cost_model.timing.step_time import estimate_step_time
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
from tests.support.published.step_times import row_hardware, row_timing, step_time

BF16 = PrecisionConfig("bf16", "bfloat16", master="bfloat16", accumulate="bfloat16", reduce="bfloat16")

# Sizes are those of ibm/PowerMoE-3b's config.json on huggingface.co.
POWERMOE = published_model(
    *("powermoe_3b", "moe", (1536, 32, 24, 8, 512, 49152), True, 4096, "config.json on huggingface.co"),
    num_experts=40,
    num_experts_per_tok=8,
)


@cache
def rows() -> tuple[PublishedRow, ...]:
    """Return all rows."""
    return tuple(_row(number, values) for number, values in numbered_rows(DATA / "mixtures.csv"))


def _row(number: int, values: Values) -> PublishedRow:
    gpus, pp, virtual, ep = (int(values[key]) for key in ("gpus", "pp", "virtual_stages", "ep"))
    is_megatron = values["source"] == "megatron_bridge"
    model, dp = _model(values["model"]), gpus // pp
    stages, (layers, more) = pp * virtual, divmod(model.num_hidden_layers, pp * virtual)
    strategy = StrategyConfig(
        "mixture",
        data_parallel="none" if dp == 1 else "ddp" if is_megatron else "fsdp",
        zero_stage=0 if dp == 1 else 1 if is_megatron else 3,
        dp_shard=dp,
        ep=ep,
        pp=pp,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        layers_per_stage=tuple(layers + (stage < more) for stage in range(stages)) if pp > 1 else None,
    )
    batch, seq_len = int(values["global_batch"]), int(values["seq_len"])
    measured = {"step_seconds": batch * seq_len / (float(values["tokens_per_second_per_device"]) * gpus)}
    if values["reserved_mib"]:
        measured["reserved_bytes"] = float(values["reserved_mib"]) * 2**20
    return published_row(
        "mixtures.csv",
        number,
        model,
        strategy,
        train_config(batch, int(values["micro_batch"]), seq_len),
        cluster=values["cluster"],
        stack="megatron" if is_megatron else "fms_acceleration",
        world_size=gpus,
        gpus_per_node=int(values["gpus_per_node"]),
        precision=BF16_MIXED if is_megatron else BF16,
        checkpointing=CheckpointingConfig("none" if is_megatron else "full"),
        measured=measured,
    )


def _model(name: str) -> ModelConfig:
    if name == POWERMOE.name:
        return POWERMOE
    model: ModelConfig = from_dict(ModelConfig, yaml.safe_load(files_in("model")[name].read_text()), "model")
    return model


def seconds(row: PublishedRow) -> Sequence[float]:
    """Return the planned seconds of a row's step, and those at both ends of the interval of mixtures."""
    hardware, timing = row_hardware(row), row_timing(row)
    machines = [changed_machine(hardware, timing, ends) for ends in ENDS["mixture"]]
    ends = [estimate_step_time(row.config, row.layout, *one, None, row.gpus_per_node) for one in machines]
    return [each.step_seconds for each in (step_time(row, hardware, timing), *ends)]


def peak_bytes(row: PublishedRow) -> int:
    """Return the planned peak of a row's fullest rank."""
    return predict_highest_rank(row.config, row.layout, load_stack(row.stack), 8).estimate.peak_bytes
