"""V-shaped pipelines: the first rank has both ends of the model, and the last one two stages in the middle."""

from pathlib import Path

import pytest

from harness.launcher.forkserver import start_forkserver
from harness.records.schema import Record
from tests.support import faults
from tests.support.commands import assert_not_proven, assert_ok, long, run_with
from tests.support.plant import Entry
from tests.support.row_invariants import check_peak

ZBV, DUAL = "pp_zbv", "pp_dualpipev"

SIZES = "train.micro_batch=1 train.seq_len=32 train.steps=1 train.warmup_steps=2"

# 12.5 million parameters over three ranks.
LARGE = (
    "model.num_hidden_layers=6 model.hidden_size=384 model.intermediate_size=1024 model.vocab_size=4001"
    " model.num_attention_heads=6 model.num_key_value_heads=2 train.global_batch=6"
)

EIGHT_LAYERS = "model.num_hidden_layers=8 train.global_batch=8"

TWO_STAGES = "strategy.virtual_stages=2 train.global_batch=8"


def record_of(results: Path, world: int, strategy: str) -> Record:
    start_forkserver("cpu")
    return run_with(results, f"world_size={world}", *SIZES.split(), *f"strategy={strategy}".split())


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        *((2, f"{strategy} train.global_batch=4") for strategy in (ZBV, DUAL)),
        long(4, f"{DUAL} {EIGHT_LAYERS} checkpointing=full precision=bf16_mixed"),
        long(4, f"{ZBV} {EIGHT_LAYERS} checkpointing=full precision=bf16_mixed"),
        long(4, f"pp_interleaved_zero_bubble {EIGHT_LAYERS} checkpointing=every_n"),
        *(long(2, f"{strategy} train.global_batch=5 model=gpt_tiny model.dropout=0.1") for strategy in (ZBV, DUAL)),
        *(
            long(3, f"{strategy} {LARGE} precision={precision} checkpointing={checkpointing}")
            for strategy in (ZBV, DUAL)
            for precision, checkpointing in (("fp32", "attention"), ("bf16_mixed", "none"), ("bf16_mixed", "full"))
        ),
        *(
            long(4, f"{product} strategy.schedule={schedule} {TWO_STAGES}")
            for schedule in ("zbv", "dualpipev")
            for product in (
                "fsdp_pp checkpointing=full",
                "tp_pp precision=bf16_mixed",
                "cp strategy.data_parallel=fsdp strategy.zero_stage=2 strategy.cp=2 strategy.pp=2",
            )
        ),
    ],
)
def test_a_v_is_proven_and_planned(results: Path, world: int, strategy: str) -> None:
    """Passes in flight are those of the papers, the bubble is that of the schedule, and the peak the plan's."""
    record = record_of(results, world, strategy)
    row = record.row
    assert_ok(row)
    check_peak(row, 0.03)
    p, m = row["pp"], row["grad_accumulation"]
    if row["schedule"] == "zero_bubble":
        assert row["pipeline_bubble_theory"] == pytest.approx((p - 1) / (6 * m))
        return
    is_dual = row["schedule"] == "dualpipev"
    assert row["max_in_flight_micro_batches"] == 2 * p + is_dual
    assert row["pipeline_bubble_theory"] == pytest.approx((p - 1) / ((3 if is_dual else 6) * m))
    assert {tuple(entry["stages"]) for entry in record.pipeline} == {(rank, 2 * p - 1 - rank) for rank in range(p)}


@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    [
        (faults.halved_at_the_turn, ZBV, "loss deviates"),
        (
            faults.weights_not_put_off,
            DUAL,
            "rank 0 deferred the weights' gradients of 0 backwards in a step, and 3 are",
        ),
        long(faults.halved_at_the_turn, f"{DUAL} {LARGE} precision=bf16_mixed", "loss deviates"),
    ],
)
def test_a_wrong_v_is_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    overrides = ("train.global_batch=4", *SIZES.split(), *f"strategy={strategy}".split())
    assert_not_proven(
        run_with(results, f"world_size={3 if LARGE in strategy else 2}", *overrides, entry=fault), problem
    )
