"""Runs that train adapters beside frozen weights: their proof, their plan, and faults of them."""

import itertools
from pathlib import Path

import pytest

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.schema import RunConfig
from harness.cost_model.flops import executed_flops_with, model_flops
from harness.cost_model.memory import estimate_memory
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from tests.support import faults
from tests.support.commands import (
    PRECISIONS,
    Entry,
    assert_not_proven,
    assert_ok,
    compose_layout,
    long,
    run_with,
    widths_of,
    with_larger,
)

CHECKPOINTING = ("none", "full")

STRATEGIES = {
    "single": 1,
    "ddp": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "fsdp_full_shard": 2,
    "fsdp_shard_grad_op": 2,
    "fsdp_no_shard": 2,
    "fsdp_hybrid_shard strategy.dp_replicate=2 strategy.dp_shard=2": 4,
}

# Ten million parameters.
LARGER = (
    "model.hidden_size=384 model.num_attention_heads=6 model.num_key_value_heads=2 model.intermediate_size=1024"
    " model.num_hidden_layers=6 train.seq_len=128 train.global_batch=8"
)

TWO_LAYERS = "model.num_hidden_layers=2"

EVERY_SECOND = "selective checkpointing.saved_products=every_second"


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (f"ddp precision=bf16_mixed {TWO_LAYERS}", 2),
        (f"fsdp_full_shard checkpointing=full {TWO_LAYERS}", 2),
        long("fsdp_shard_grad_op model.tie_word_embeddings=true model.adapter.target_modules=[q_proj,v_proj]", 2),
        long("ddp model=gpt_tiny model.adapter.target_modules=[up_proj]", 2),
        *(
            long(f"{strategy} precision={precision} checkpointing={checkpointing} {LARGER}", world)
            for (strategy, world), precision, checkpointing in itertools.product(
                STRATEGIES.items(), PRECISIONS, CHECKPOINTING
            )
        ),
        long("zero1 precision=bf16_mixed", 2),
        long("zero2 strategy.engine=accelerate model.adapter.target_modules=[q_proj,v_proj]", 2),
        (f"zero3 precision=bf16_mixed checkpointing=full {TWO_LAYERS}", 2),
        long("ddp checkpointing=attention", 2),
        long(f"zero3 checkpointing={EVERY_SECOND}", 2),
        long("tp", 2),
        (f"tp_sp precision=bf16_mixed model.adapter.target_modules=[q_proj,down_proj] {TWO_LAYERS}", 2),
        long("cp", 2),
        long("zero1_torch", 2),
        *(
            long(f"{strategy} precision={precision} checkpointing={checkpointing} {LARGER}", 2)
            for strategy, precision, checkpointing in itertools.product(
                ("ddp", "fsdp_full_shard", "zero3"), PRECISIONS, ("attention", "selective", EVERY_SECOND)
            )
        ),
        *(
            long(f"{strategy} strategy.engine=accelerate {LARGER}", 2)
            for strategy in ("ddp", "zero1", "zero2", "zero3")
        ),
        *(
            long(f"{strategy} precision={precision} checkpointing={checkpointing} {LARGER}", world)
            for (strategy, world), precision, checkpointing in itertools.product(
                {"tp": 2, "tp_sp": 2, "fsdp_tp strategy.tp=2": 4}.items(), PRECISIONS, ("none", "full")
            )
        ),
        long("zero3 model.tie_word_embeddings=true checkpointing=full", 2),
        long("zero1_defaults precision=bf16_mixed", 2),
        long("zero2_tuned", 2),
        long("zero3_tuned precision=bf16_mixed", 2),
        long("ddp optimizer=sgd train.loss_chunks=2", 2),
    ],
)
def test_adapters_are_proven(results: Path, overrides: str, world: int) -> None:
    words = f"strategy={overrides} adapter=lora".split()
    record = run_with(results, f"world_size={world}", *words)
    assert_ok(record.row)
    config, layout = read_run_config(record.config), from_dict(Layout, record.layout)
    widths = widths_of(config, layout)
    planned = estimate_memory(config, layout, widths)
    assert record.row["optimizer_bytes"] == planned.optimizer_bytes
    assert record.row["trained_parameters"] + record.row["frozen_parameters"] == record.row["parameters"]
    assert record.row["executed_flops"] == executed_flops_with(
        config, layout, is_fused(config), widths.recomputes_last_projection
    )
    peak = record.row["peak_allocated_bytes"]  # higher where gloo's threads free their copies late, on a busy machine
    assert record.row["predicted_peak_bytes"] == pytest.approx(peak, rel=0.15)


KINDS = ("none", "full", "attention", "selective", EVERY_SECOND)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (f"ddp checkpointing=full {TWO_LAYERS}", 2),
        long("single precision=bf16_mixed", 1),
        *(
            long(f"ddp precision={precision} checkpointing={checkpointing} {size}", 2)
            for precision, checkpointing, size in itertools.product((*PRECISIONS, "bf16"), KINDS, ("", LARGER))
        ),
        long("ddp model=gpt_tiny model.adapter.double_quant=false", 2),
        long("ddp model.tie_word_embeddings=true optimizer=sgd train.loss_chunks=2", 2),
        long(f"cp precision=bf16_mixed {LARGER}", 2),
        long("cp_ulysses", 2),
        long("zero1_torch", 2),
    ],
)
def test_adapters_of_packed_matrices_are_proven(results: Path, overrides: str, world: int) -> None:
    record = run_with(results, f"world_size={world}", *f"strategy={overrides} adapter=qlora".split())
    assert_ok(record.row)
    config, layout = read_run_config(record.config), from_dict(Layout, record.layout)
    widths = widths_of(config, layout)
    planned = estimate_memory(config, layout, widths)
    assert record.row["parameter_bytes"] == planned.parameter_bytes
    assert record.row["optimizer_bytes"] == planned.optimizer_bytes
    assert record.row["executed_flops"] == executed_flops_with(
        config, layout, is_fused(config), widths.recomputes_last_projection
    )
    peak = record.row["peak_without_backend_bytes"]
    scratch = ONEDNN_BYTES * (config.precision.compute == "bfloat16")
    assert record.row["predicted_peak_bytes"] == pytest.approx(peak, rel=0.01, abs=scratch)


ONEDNN_BYTES = 2**17 + 2**12  # that a product in bf16 takes on a CPU beside its operands, which no plan has


def is_fused(config: RunConfig) -> bool:
    return config.model.attention == "flash" and config.model.dropout == 0


def test_a_frozen_matrix_costs_two_thirds() -> None:
    config, _ = compose_layout(1, "adapter=lora", "model.adapter.r=1", "model.adapter.target_modules=[q_proj]", *SHORT)
    full, _ = compose_layout(1, *SHORT)
    model, tokens = config.model, config.train.global_batch * config.train.seq_len
    hidden, inner, keys = model.hidden_size, model.intermediate_size, model.hidden_size // 2
    matrices = model.num_hidden_layers * hidden * (2 * hidden + 2 * keys + 3 * inner) + hidden * model.vocab_size
    adapters = model.num_hidden_layers * 2 * hidden
    assert model_flops(full) - model_flops(config) == tokens * (2 * matrices - 6 * adapters)


SHORT = ("train.seq_len=32", "train.global_batch=8", "train.micro_batch=1", "model=tiny")

FAULTS = [
    (faults.frozen_weight_trained, "ddp", "adapter=lora freezes this parameter"),
    (faults.frozen_weights_decayed, "fsdp_full_shard", "which adapter=lora freezes"),
    (faults.adapters_unreduced, "ddp", "bytes a step along"),
    (faults.adapters_start_elsewhere, "ddp", "lora_B"),
    (faults.frozen_weights_decayed_by_deepspeed, "zero1", "which adapter=lora freezes"),
    (faults.frozen_weights_gathered, "zero3", "still whole between steps"),
    (faults.adapters_without_updates, "zero2", "do not add up to"),
    (faults.whole_adapters_unreduced, "tp", "bytes a step along"),
]

WIDE = (
    faults.frozen_weights_as_wide_as_masters,
    "fsdp_full_shard precision=bf16_mixed",
    "frozen parameters: values in float32",
)

PACKED_FAULT = (faults.scales_of_one_rank, "ddp", "rank 1 changed")

FURTHER_PACKED_FAULTS = [
    (faults.base_packed_twice, "ddp", "which adapter=qlora freezes"),
    (faults.base_in_longer_blocks, "ddp", "4 bits with scales make"),
    (faults.base_not_packed, "ddp", "values in uint8 are not held"),
    (faults.adapters_unreduced, "ddp", "bytes a step along"),
    (faults.adapters_start_elsewhere, "ddp", "lora_B"),
]

# The same faults in other engines, and one that test_proof.py has without adapters.
OF_OTHER_ENGINES = [
    (faults.frozen_weights_decayed, "ddp", "which adapter=lora freezes"),
    (faults.adapters_start_elsewhere, "fsdp_full_shard", "deviates by"),
    (faults.frozen_weight_trained, "zero2", "adapter=lora freezes this parameter"),
    (faults.adapters_start_elsewhere, "zero3", "deviates by"),
    (faults.frozen_weights_decayed_by_deepspeed, "zero3", "which adapter=lora freezes"),
    (faults.every_product_kept, f"ddp checkpointing={EVERY_SECOND}", "floating-point operations"),
]


@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    [*with_larger(FAULTS, LARGER, OF_OTHER_ENGINES), WIDE, long(WIDE[0], f"{WIDE[1]} {LARGER}", WIDE[2])],
)
def test_a_fault_of_adapters_is_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    words = f"world_size=2 {TWO_LAYERS} strategy={strategy} adapter=lora".split()
    assert_not_proven(run_with(results, *words, entry=fault), problem)


@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    with_larger([PACKED_FAULT], LARGER, FURTHER_PACKED_FAULTS),
)
def test_a_fault_of_packed_matrices_is_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    words = f"world_size=2 {TWO_LAYERS} strategy={strategy} adapter=qlora".split()
    assert_not_proven(run_with(results, *words, entry=fault), problem)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("strategy=fsdp_full_shard strategy.engine=accelerate", "through Accelerate"),
        ("strategy=tp model=gpt_tiny", "without biases"),
        ("strategy=zero1_tp", "strategy.engine=torch and matrices"),
        ("strategy=pp_1f1b", "strategy.pp=2 was not tried"),
        ("strategy=ddp model=moe_tiny", "dense decoder"),
        ("strategy=ddp optimizer=muon", "was not tried"),
        ("strategy=ddp train.compile=true", "fuse the products"),
        ("strategy=ddp model.adapter.target_modules=[lm_head]", "which the layers do not have"),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused(words: str, reason: str) -> None:
    problems = list(incompatibilities(*compose_layout(2, "adapter=lora", *words.split())))
    assert any(reason in problem and "choose" in problem for problem in problems)
