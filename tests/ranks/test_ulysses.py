"""Context parallelism by Ulysses: proven rows, whose bytes are those of the paper and whose peaks are the plan's."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records.schema import Record
from harness.report.claims import claims
from harness.report.lines import lines_of
from tests.support import row_invariants
from tests.support.commands import assert_ok, long, run_folder, run_with
from tests.support.derived import check_derivations

# 10.6 million parameters, whose activations of long sequences are most of a step's memory.
LARGE = (
    "model.hidden_size=384 model.intermediate_size=1024 model.num_hidden_layers=4 model.vocab_size=4001"
    " model.num_attention_heads=12 model.num_key_value_heads=4 train.global_batch=2 train.micro_batch=1"
)

GPT = "model=gpt_tiny model.context_length=512"

THREE = "world_size=3 model.num_attention_heads=3 model.num_key_value_heads=1 model.hidden_size=96 train.seq_len=57"

FSDP = "strategy.data_parallel=fsdp strategy.zero_stage=3"

CASES = [
    "world_size=2 checkpointing=attention model.num_hidden_layers=2",
    # Two heads of keys, sent twice.
    "world_size=4 checkpointing=selective model.num_key_value_heads=2 model.num_hidden_layers=2",
    long(f"world_size=4 strategy.cp=2 strategy.tp=2 {FSDP} checkpointing=full model.attention=eager"),
    *(
        long(overrides)
        for overrides in (
            THREE,
            f"{THREE} checkpointing=full model.attention=eager precision=bf16_mixed",
            f"world_size=3 {LARGE} train.seq_len=255 checkpointing=full",
            f"world_size=3 {LARGE} train.seq_len=129 precision=bf16_mixed checkpointing=attention",
            f"world_size=2 {LARGE} train.seq_len=510 checkpointing=selective",
            f"world_size=4 {LARGE} train.seq_len=256 model.attention=eager checkpointing=attention",
            f"world_size=4 {LARGE} train.seq_len=252 model.num_key_value_heads=1 precision=bf16 checkpointing=full",
            f"world_size=8 {LARGE} train.seq_len=128 strategy.cp=2 strategy.tp=2 strategy.dp_shard=2 {FSDP}"
            " precision=bf16_mixed model.vocab_size=4000",
            "world_size=8 model.num_attention_heads=8 train.global_batch=2 train.micro_batch=1 precision=bf16",
            "world_size=4 strategy.cp=2 strategy.pp=2 checkpointing=full",
            "world_size=4 strategy.cp=2 strategy.dp_replicate=2 train.loss_chunks=2",
            "world_size=2 checkpointing=full checkpointing.offload_activations=true",
            f"world_size=2 {GPT} checkpointing=attention",
            f"world_size=4 {GPT} precision=bf16_mixed checkpointing=selective model.attention=eager",
            f"world_size=2 {GPT} model.dropout=0.1 checkpointing=full model.attention=eager",
            "world_size=2 adapter=lora checkpointing=full",
            "world_size=4 strategy.cp=2 strategy.ep=2 strategy.dp_replicate=2 model=moe_tiny",
        )
    ),
]


def layer_bytes(record: Record, cp: int, tp: int) -> float:
    """Return what a rank sends for a layer and a sequence in one pass, by section 3.2 of arXiv 2309.14509.

    That is its positions' queries, outputs, keys and values, the last two repeated until the ranks divide their heads.
    """
    model, width = record.config["model"], {"float32": 4}.get(record.config["precision"]["compute"], 2)
    heads, keys = model["num_attention_heads"] // tp, model["num_key_value_heads"] // tp
    head_size = model["hidden_size"] // model["num_attention_heads"]
    sent_heads = 2 * heads + 2 * math.lcm(keys, cp)
    return record.row["seq_len"] / cp * sent_heads * head_size * width * (cp - 1) / cp


@pytest.mark.parametrize("overrides", CASES)
def test_ranks_that_exchange_heads_are_proven(results: Path, overrides: str) -> None:
    record = run_with(results, "strategy=cp_ulysses", *overrides.split())
    row = record.row
    assert_ok(row)
    assert row["context_parallel"] == "ulysses"
    if row["dropout"] == 0:
        assert 0 < row["grad_deviation"] < {"fp32": 1e-4, "bf16": 0.2}.get(row["precision"], 0.1)
    row_invariants.check_peak(row, 0.05 if "moe" in overrides else 0.025)  # an untrained router gives some experts more
    if "moe" not in overrides:  # whose steps have tensors of other sizes, as tokens go to other experts
        row_invariants.check_memory(row, run_folder(results, record).read_rank_reports(row["world_size"]))
    row_invariants.check_bytes(record)
    check_derivations(record)
    layers = record.config["model"]["num_hidden_layers"]
    if row["pp"] == 1 and row["checkpointing"] in ("none", "full"):
        sequences = row["grad_accumulation"] * row["micro_batch"] * layers * (2 + (row["checkpointing"] == "full"))
        sent = sum(
            each["bytes"]
            for each in record.communication
            if each["axis"] == "cp" and each["purpose"] == "layout" and each["operation"] == "all_to_all"
        )
        assert sent == pytest.approx(sequences * layer_bytes(record, row["cp"], row["tp"]), abs=0.5)


@pytest.mark.long
def test_as_many_bytes_are_sent_as_the_paper_counts(results: Path) -> None:
    """The same bytes where sequence and ranks grow together, but for a rank's own part; repeated heads add to them."""
    two = run_with(results, "strategy=cp_ulysses", "model.num_key_value_heads=4", "train.seq_len=32")
    four = run_with(results, "strategy=cp_ulysses", "model.num_key_value_heads=4", "world_size=4")
    repeated = run_with(results, "strategy=cp_ulysses", "model.num_key_value_heads=1")
    of_all = [claims(lines_of([each])) for each in (two, four, repeated)]
    made = [claim for each in of_all for claim in each if claim.subject == "all-to-all"]
    assert [claim.agrees for claim in made] == [True, True, False]
    assert made[1].measured / made[0].measured == pytest.approx((3 / 4) / (1 / 2))
    twice = [entry | {"bytes": 2 * entry["bytes"]} for entry in two.communication]
    assert [claim.agrees for claim in claims(lines_of([replace(two, communication=twice)]))] == [False]
