"""Runs of some ten million parameters, where rounding, padding and groups of unlike size show."""

from pathlib import Path

import pytest

from harness.worker import main as worker_main
from tests.support import replayed_faults
from tests.support.combinations import Combination
from tests.support.commands import run_with

TEN_MILLION = (
    # 11.0 million parameters: most of them in the embedding and the head, whose odd number of rows no world divides.
    *("model.hidden_size=384", "model.intermediate_size=1024", "model.num_hidden_layers=2", "model.vocab_size=10001"),
    *("model.num_attention_heads=6", "model.num_key_value_heads=2"),
    # Four micro-batches on each of two data-parallel ranks, or eight.
    *("train.seq_len=32", "train.global_batch=8", "train.micro_batch=1", "train.steps=1", "train.warmup_steps=1"),
)

# By the strategy's options: the model that all tests of ranks share, of half a million parameters, and the large one.
SIZES = {"0.5M": ("checkpointing=none",), "11M": TEN_MILLION}


@pytest.mark.parametrize(
    "strategy",
    [
        *("zero1", "fsdp_full_shard", "tp"),
        *(pytest.param(strategy, marks=pytest.mark.long) for strategy in ("zero2", "zero3", "fsdp_shard_grad_op")),
    ],
)
def test_ten_million_parameters_are_proven(strategy: str, results: Path) -> None:
    """Bytes are the formula's and its padding exactly, which the odd number of rows of the vocabulary needs."""
    record = Combination(strategy, 2, TEN_MILLION).record(results)
    assert record.status == "ok", record.row["reason"]
    assert record.row["grad_deviation"] < 2e-5
    for entry in record.traffic:
        assert entry["bytes"] == pytest.approx(entry["padded_bytes"], abs=0.5), entry
        assert entry["formula_bytes"] <= entry["padded_bytes"] < entry["formula_bytes"] * 1.001, entry
    if strategy == "fsdp_full_shard":
        assert any(entry["padded_bytes"] > entry["formula_bytes"] for entry in record.traffic)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        *((strategy, "0.5M") for strategy in ("zero2", "zero3", "fsdp_full_shard")),
        ("fsdp_full_shard", "11M"),
        *(pytest.param(strategy, "11M", marks=pytest.mark.long) for strategy in ("zero2", "zero3")),
    ],
)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(replayed_faults.gathered_once_more, "gather"), (replayed_faults.reduced_once_less, "reduce")],
)
def test_one_small_tensor_too_many_or_too_few_is_an_error(
    fault: replayed_faults.Fault, kind: str, strategy: str, size: str, results: Path
) -> None:
    """A final norm's weight is 384 bytes of a step's millions."""
    problems = replayed_faults.problems_of(results, Combination(strategy, 2, SIZES[size]), fault)
    assert any(f"bytes a step along dp_shard {kind}, which is" in problem for problem in problems), problems


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_padding_behind_the_last_parameter_is_no_gradient(strategy: str, results: Path) -> None:
    """Five ranks do not divide the elements of this vocabulary, so that DeepSpeed pads the last rank's partition."""
    batch = ("train.global_batch=5", "train.micro_batch=1", "train.seq_len=32", "train.steps=1", "train.warmup_steps=1")
    overrides = (f"strategy={strategy}", "world_size=5", "model.vocab_size=257", *batch)
    record = run_with(results, worker_main.main, *overrides)
    assert record.status == "ok", record.row["reason"]
