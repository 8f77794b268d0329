"""Runs with each optimizer: their proof, the bytes of their states, and faults of their updates."""

import itertools
from pathlib import Path

import pytest

from harness.config.optimizer import OPTIMIZERS
from harness.cost_model.memory import estimate_memory
from harness.layout.compatibility import incompatibilities
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

OTHERS = [name for name in OPTIMIZERS if name != "adamw"]

# By strategy and ranks, the optimizers that can update its tensors.
MORE = {
    ("ddp", 2): OTHERS,
    ("fsdp_shard_grad_op", 2): OTHERS,
    ("fsdp_hybrid_shard strategy.dp_replicate=2 strategy.dp_shard=2", 4): OTHERS,
    ("fsdp_pp strategy.pp=2", 4): OTHERS,
    ("cp strategy.cp=2", 2): OTHERS,
    ("tp", 2): ("adamw_8bit", "adamw_bf16", "sgd"),
    ("fsdp_tp strategy.tp=2", 4): ("adamw_8bit", "adamw_bf16", "sgd"),
    ("ddp strategy.engine=accelerate", 2): OTHERS,
    **{(name, 2): ("adamw_bf16", "sgd") for name in ("zero1", "zero2", "zero3")},
    ("zero3 strategy.engine=accelerate", 2): ("sgd",),
}

TWO_LAYERS = "model.num_hidden_layers=2"  # unless a case has more

# About five million parameters.
LARGER = (
    "model.hidden_size=288 model.num_attention_heads=6 model.num_key_value_heads=2 model.intermediate_size=768"
    " model.num_hidden_layers=5 train.seq_len=128 train.global_batch=8"
)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        *((f"fsdp_full_shard optimizer={name}", 2) for name in OTHERS),
        ("zero3 optimizer=sgd precision=bf16_mixed", 2),
        long("zero1_torch optimizer=adamw_bf16", 2),
        *(
            long(f"{strategy} optimizer={name} precision={precision}", world)
            for precision in PRECISIONS
            for (strategy, world), names in MORE.items()
            for name in names
        ),
        *(long(f"zero1_torch optimizer={name}", 2) for name in ("adamw_8bit", "sgd")),
        *(
            long(f"fsdp_full_shard optimizer={name} precision={precision} {LARGER}", world)
            for name, precision, world in itertools.product(OTHERS, PRECISIONS, (2, 4))
        ),
    ],
)
def test_an_optimizer_is_proven(results: Path, overrides: str, world: int) -> None:
    words = f"{TWO_LAYERS} strategy={overrides}".split()
    record = run_with(results, f"world_size={world}", *words)
    assert_ok(record.row)
    config, layout = compose_layout(world, *words)
    planned = estimate_memory(config, layout, widths_of(config, layout))
    if not layout.pp_enabled:  # whose ranks have different stages, and the fullest need not have most states
        assert record.row["optimizer_bytes"] == planned.optimizer_bytes
    peak = record.row["peak_allocated_bytes"]  # higher where gloo's threads free their copies late, on a busy machine
    assert record.row["predicted_peak_bytes"] == pytest.approx(peak, rel=0.15)


FAULTS = [
    (faults.shards_orthogonalized, "optimizer=muon strategy=fsdp_full_shard", "update deviates by"),
    (faults.without_scales, "optimizer=adamw_8bit strategy=fsdp_full_shard", "first moments"),
    (faults.momentum_lost, "optimizer=sgd strategy=ddp", "is not the same on all ranks that have it"),
    (faults.momentum_lost, "optimizer=sgd strategy=fsdp_full_shard", "deviates by"),
]


@pytest.mark.parametrize(("fault", "overrides", "problem"), with_larger(FAULTS, LARGER))
def test_a_fault_of_an_update_is_an_error(results: Path, fault: Entry, overrides: str, problem: str) -> None:
    assert_not_proven(run_with(results, TWO_LAYERS, *overrides.split(), entry=fault), problem)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("strategy=zero3 optimizer=muon", "it needs whole matrices"),
        ("strategy=zero1 optimizer=adamw_8bit", "seldom a multiple of 256"),
        ("strategy=zero1_torch optimizer=muon", "is of two classes"),
        ("strategy=tp optimizer=muon", "needs whole"),
        ("strategy=fsdp_full_shard strategy.offload=parameters optimizer=adamw_bf16", "was not tried"),
        ("strategy=ddp model=moe_tiny optimizer=muon", "three dimensions"),
        ("strategy=ddp optimizer=sgd train.fused_optimizer=false", "which has one form"),
    ],
)
def test_what_an_optimizer_cannot_update_is_refused(words: str, reason: str) -> None:
    (problem,) = incompatibilities(*compose_layout(2, *words.split()))
    assert reason in problem and "choose" in problem
