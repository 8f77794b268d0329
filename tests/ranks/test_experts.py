"""Mixtures of experts, whole and divided, are proven rows, and what other projects got wrong in them is an error."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records.schema import Record
from harness.report.claims import claims
from harness.report.lines import lines_of
from tests.support import faults
from tests.support.commands import Entry, assert_not_proven, assert_ok, long, run_with, with_larger

SIZES = "model=moe_tiny model.num_hidden_layers=2 train.micro_batch=1 train.seq_len=32"

SHARED = "model.shared_expert_intermediate_size=96"

BALANCED = "model.router_aux_loss_coef=0.01"

# The kinds of parallelism whose code differs for experts, by world size.
STRATEGIES = {
    1: ("single",),
    2: (
        *("ddp", "zero3", "tp", "pp_1f1b", "ep", "fsdp_ep"),
        *(f"ep {SHARED}", f"ep {BALANCED}"),
    ),
    4: ("fsdp_ep strategy.zero_stage=2",),
}

MORE = {
    2: (
        *(
            "zero1",
            "zero1_torch",
            "zero2",
            "fsdp_full_shard",
            "fsdp_shard_grad_op",
            "fsdp_no_shard",
            "cp",
            "pp_gpipe",
            "tp_sp",
        ),
        *(f"{strategy} {SHARED}" for strategy in ("zero3", "tp", "pp_1f1b", "cp", "fsdp_full_shard")),
        *(f"{each} {BALANCED}" for each in ("zero1", "zero3", "tp", "pp_1f1b", "fsdp_full_shard", "ddp")),
        f"ep {SHARED} precision=bf16_mixed checkpointing=selective",
        f"ep {BALANCED} precision=bf16_mixed checkpointing=full train.micro_batch=2",
        f"zero2 {BALANCED} precision=bf16_mixed checkpointing=selective strategy.engine=accelerate",
        f"fsdp_ep {SHARED} checkpointing=full model.routing=balanced",
    ),
    3: ("fsdp_full_shard model.num_experts=2 train.global_batch=6 checkpointing=full",),  # fewer experts than shards
    4: (
        f"fsdp_ep strategy.tp=2 strategy.sequence_parallel=true {SHARED} {BALANCED}",
        "ep strategy.pp=2",
        "fsdp_ep strategy.cp=2",
        "fsdp_ep strategy.dp_replicate=2",
        "fsdp_ep strategy.ep=2 model.num_experts=2 precision=bf16_mixed",  # fewer experts than shards
        "fsdp_tp model.num_experts=1 model.num_experts_per_tok=1 model.norm_topk_prob=false",
        "fsdp_tp",
        "tp_pp",
        "fsdp_ep strategy.pp=2",
        "fsdp_no_shard strategy.ep=2",
        "ep",
        "fsdp_ep strategy.ep=4",
    ),
    6: ("fsdp_ep strategy.ep=3 model.num_experts=9 model.num_experts_per_tok=3 train.global_batch=12",),
    8: ("fsdp_ep strategy.ep=4", "3d", "fsdp_ep strategy.tp=2 strategy.pp=2", "ep strategy.ep=8"),
}

# By precision, checkpointing and how tokens are routed; a token may have one expert, or all.
OPTIONS = (
    "precision=bf16_mixed checkpointing=selective",
    "checkpointing=full model.routing=balanced",
    "precision=bf16_mixed checkpointing=every_n model.num_experts_per_tok=1 model.norm_topk_prob=false",
    "checkpointing=attention model.num_experts=4 model.num_experts_per_tok=4",
    "model.head_dim=48 precision=bf16",
)


MOST_STEPS = 4  # steps of these runs that are proven at least in fp32


def record_of(results: Path, world: int, overrides: str, entry: Entry | None = None) -> Record:
    sizes = f"{SIZES} train.global_batch={4 if world <= 2 else 8} world_size={world}"
    arguments = f"{sizes} strategy={overrides}".split()
    return run_with(results, *arguments) if entry is None else run_with(results, *arguments, entry=entry)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        *((world, each) for world, all_ in STRATEGIES.items() for each in all_),
        *((2, f"{each} {options}") for each, options in zip(("ep", "fsdp_ep"), OPTIONS, strict=False)),
        *(long(world, each) for world, all_ in MORE.items() for each in all_),
        *(
            long(2, f"{each} {options}")
            for each, options in itertools.product(("ddp", "zero3", "tp_sp", "ep", "fsdp_ep"), OPTIONS)
        ),
    ],
)
def test_a_mixture_is_proven(results: Path, world: int, overrides: str) -> None:
    record = record_of(results, world, overrides)
    assert_ok(record.row)
    row = record.row
    if row["precision"] == "fp32":
        assert row["loss_deviation"] < 1e-4 and row["grad_deviation"] < 1e-4 and row["proven_steps"] >= MOST_STEPS


def test_tokens_are_sent_as_often_as_papers_count(results: Path) -> None:
    record = record_of(results, 2, f"fsdp_ep {OPTIONS[1]}")
    twice = [entry | {"bytes": 2 * entry["bytes"]} for entry in record.communication]
    of_all = [claims(lines_of([each])) for each in (record, replace(record, communication=twice))]
    assert [claim.agrees for each in of_all for claim in each if claim.subject == "all-to-all"] == [True, False]


ONE_EXPERT = "model.num_experts=1 model.num_experts_per_tok=1 model.norm_topk_prob=false"

FAULTS = [
    (faults.experts_scaled_by_ep, "fsdp_ep", ".mlp.experts."),
    (faults.experts_summed, "ep", ".mlp.experts."),
    (faults.tokens_of_others_without_gradient, "ep", "gradient deviates by"),
    (faults.router_detached, "fsdp_ep", ".mlp.gate.weight's first"),
    (faults.balanced_by_micro_batch, f"ep {BALANCED}", ".mlp.gate.weight's"),
    (faults.experts_whole, "fsdp_ep", "2 of 2 ranks hold them, and the layout has 1 copies"),
    (faults.few_experts_padded, f"fsdp_full_shard {ONE_EXPERT}", "equal share"),
]

FURTHER = [
    (faults.balanced_by_every_rank, f"fsdp_ep {BALANCED}", ".mlp.gate.weight's"),
    (faults.tokens_in_another_order, "ep", "gradient deviates by"),
    (faults.tokens_dropped, "fsdp_ep", "gradient deviates by"),
    (faults.last_use_without_gradient, "ep", "gradient deviates by"),
    (faults.shared_experts_detached, f"ep {SHARED}", "gradient deviates by"),
    (faults.shared_experts_detached, f"tp {SHARED}", "gradient deviates by"),
]

# About five million parameters, in both precisions.
LARGER = (
    "model.hidden_size=192 model.num_attention_heads=6 model.num_key_value_heads=2 model.intermediate_size=192"
    " model.num_hidden_layers=4 model.vocab_size=4001 data=synthetic train.seq_len=128 train.global_batch=16"
    " train.micro_batch=2 train.steps=3"
)


@pytest.mark.parametrize(
    ("fault", "overrides", "problem"),
    with_larger(FAULTS, LARGER, FURTHER),
)
def test_a_fault_in_a_mixture_is_an_error(results: Path, fault: Entry, overrides: str, problem: str) -> None:
    assert_not_proven(record_of(results, 2, overrides, fault), problem)
