"""Secondary shards: what backward gathers among few ranks, in place of the shards of all ranks."""

from pathlib import Path

import pytest

from harness.launcher.forkserver import start_forkserver
from harness.records.schema import Record
from tests.support import faults
from tests.support.commands import assert_not_proven, assert_ok, long, run_with
from tests.support.plant import Entry
from tests.support.row_invariants import check_peak

FSDP, HPZ = "fsdp_full_shard strategy.secondary_shards=2", "zero3_hpz"

# Three micro-batches of each of four ranks.
SIZES = (
    "train.global_batch=12 train.micro_batch=1 train.seq_len=32 train.steps=1 train.warmup_steps=2"
    " model.num_hidden_layers=2"
)

# 11 million parameters, in matrices that four ranks do not divide.
LARGE = (
    "model.hidden_size=384 model.intermediate_size=1026 model.num_hidden_layers=3 model.vocab_size=10001"
    " model.num_attention_heads=6 model.num_key_value_heads=2 train.global_batch=8 train.warmup_steps=1"
)


def record_of(results: Path, strategy: str, *more: str, world: int = 4) -> Record:
    start_forkserver("cpu")
    return run_with(results, f"world_size={world}", *SIZES.split(), *f"strategy={strategy}".split(), *more)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (FSDP, 4),
        long(f"{FSDP} precision=bf16_mixed checkpointing=full", 4),
        (HPZ, 4),
        long(f"{HPZ} precision=bf16_mixed checkpointing=full model=gpt_tiny", 4),
        long(f"{FSDP} strategy.secondary_shards=3 model.vocab_size=259", 6),
        long(f"{HPZ} strategy.secondary_shards=3 model.vocab_size=259 model.tie_word_embeddings=true", 6),
        long("fsdp_hybrid_shard strategy.dp_replicate=2 strategy.secondary_shards=2 train.global_batch=16", 8),
        *(
            long(f"{strategy} {LARGE} precision={precision} checkpointing={checkpointing}", 4)
            for strategy in (FSDP, HPZ)
            for precision, checkpointing in (("fp32", "selective"), ("bf16_mixed", "none"))
        ),
    ],
)
def test_secondary_shards_are_proven_and_planned(results: Path, strategy: str, world: int) -> None:
    """Bytes are the formula's exactly, gradients those of a single process, and the peak is the plan's."""
    row = record_of(results, strategy, world=world).row
    assert_ok(row)
    check_peak(row, 0.01)


@pytest.mark.parametrize("strategy", [FSDP, HPZ])
def test_only_the_first_gathering_is_among_all_ranks(results: Path, strategy: str) -> None:
    """FSDP2 divides again in each micro-batch, and DeepSpeed keeps its secondary shards until the update."""
    (entry,) = (entry for entry in record_of(results, strategy).traffic if entry["axis"] == "dp_shard")
    gatherings, first = 2 * 3, 1 if strategy == HPZ else 3
    parameters = 252_384
    moved = first * 3 / 4 + (gatherings - first) / 2 + 3 * 3 / 4  # and a reduction in each micro-batch
    assert entry["bytes"] == pytest.approx(4 * parameters * moved, rel=1e-3)


@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    [
        (faults.stale_secondary_shards, HPZ, "gradient deviates"),
        long(faults.other_secondary_shards, FSDP, "gradient deviates"),
        (faults.gathered_among_all, FSDP, "bytes a step along dp_shard gather, which is"),
        long(faults.stale_secondary_shards, f"{HPZ} {LARGE} precision=bf16_mixed", "gradient deviates"),
        long(faults.other_secondary_shards, f"{FSDP} {LARGE} precision=bf16_mixed", "gradient deviates"),
    ],
)
def test_wrong_secondary_shards_are_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    overrides = (*SIZES.split(), *f"strategy={strategy}".split())
    assert_not_proven(run_with(results, "world_size=4", *overrides, entry=fault), problem)
