"""Checkpoints of real ranks: a new engine goes on from them bit by bit, and what lacks in them is noticed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.records.schema import Record
from harness.worker import main as worker_main
from tests.support import faults
from tests.support.commands import ROOT, Entry, assert_not_proven, assert_ok, long, run_folder, run_with
from tests.support.processes import TINY

SYNC, ASYNC = "train.save=sync", "train.save=async"

ALONE = ("proof.reference=false", "train.seq_len=32", "model.num_hidden_layers=2", "model.num_key_value_heads=4")

EXPERTS = "model=moe_tiny train.micro_batch=1"

DROPPING = "ddp model=gpt_tiny model.dropout=0.1 train.save=sync"

LARGE = (  # 11 million parameters, whose heads and batches three and four ranks can divide
    "model.hidden_size=384 model.intermediate_size=864 model.num_attention_heads=12 model.num_key_value_heads=12"
    " model.num_hidden_layers=6 model.vocab_size=2000 train.global_batch=12 train.micro_batch=1 train.seq_len=48"
)


def saved(results: Path, words: str, entry: Entry = worker_main.main) -> Record:
    """Return the record of a small run that saves, by the words of its overrides behind `strategy=`."""
    return run_with(results, *ALONE, *f"strategy={words}".split(), entry=entry)


@pytest.mark.parametrize(
    ("words", "bytes_per_parameter"),
    [
        (f"ddp {SYNC}", 12),
        (f"ddp {SYNC} precision=bf16_mixed", 14),
        long(f"ddp {ASYNC}", 12),
        (f"ddp {SYNC} strategy.engine=accelerate", 12),
        long(f"fsdp_full_shard {SYNC}", 12),
        (f"fsdp_full_shard {ASYNC}", 12),
        (f"tp {SYNC}", 12),
        (f"pp_1f1b {SYNC}", 12),
        (f"zero1 {SYNC}", 16),
        (f"zero3 {SYNC}", 12),
        (f"ep {SYNC} {EXPERTS}", 12),
        (f"ddp {SYNC} adapter=lora", None),
        (DROPPING, 12),
        long(f"zero_offload {SYNC}", 16),
        long(f"zero1_tp {SYNC}", None),  # both ranks have embedding and head, and write them
        long(f"pp_interleaved {SYNC} model.num_hidden_layers=4", 12),
        long(f"fsdp_ep {SYNC} {EXPERTS}", 12),
        long(f"cp_ulysses {SYNC}", 12),
        long(f"pp_zbv {SYNC} model.num_hidden_layers=4 train.micro_batch=1", 12),
        long(f"pp_dualpipev {SYNC} model.num_hidden_layers=4 train.micro_batch=1", 12),
        long(f"pp_interleaved_zero_bubble {SYNC} model.num_hidden_layers=4", 12),
        # Of four ranks' shards of so few elements, what is written beside each weighs more.
        long(f"fsdp_full_shard {SYNC} strategy.secondary_shards=2 world_size=4", None),
        long(f"fsdp_tp {SYNC} world_size=4", None),
        long(f"fsdp_tp {ASYNC} strategy.cp=2 strategy.context_parallel=ulysses world_size=4", None),
        long(f"fsdp_ep {SYNC} {EXPERTS} world_size=4 strategy.tp=2", 12),
        *(long(f"ddp {SYNC} optimizer={name}", size) for name, size in (("sgd", 8), ("muon", 8), ("adamw_bf16", 8))),
    ],
)
def test_training_goes_on_from_a_checkpoint_bit_by_bit(
    results: Path, words: str, bytes_per_parameter: int | None
) -> None:
    """The files have what the library writes of each parameter, and a few bytes for each tensor; they are removed."""
    record = saved(results, words)
    row = record.row
    assert_ok(row)
    assert 0 < row["save_seconds"] <= row["save_total_seconds"] and row["load_seconds"] > 0
    assert row["save_file_system"] and row["save_peak_bytes"] > 0
    assert 0 < row["checkpoint_rank_bytes"] <= row["checkpoint_bytes"]
    if bytes_per_parameter is not None:
        size = row["checkpoint_bytes"] / row["parameters"]
        assert bytes_per_parameter < size < bytes_per_parameter + 1.5
    assert not run_folder(results, record).checkpoint.exists()


@pytest.mark.long
@pytest.mark.parametrize("world", (3, 4))
@pytest.mark.parametrize(
    "strategy",
    (
        *("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard", "tp", "tp_sp", "pp_1f1b", "pp_zero_bubble"),
        *("cp", "zero1", "zero2", "zero3", "ddp strategy.engine=accelerate", "ddp adapter=lora"),
    ),
)
def test_larger_models_go_on_from_checkpoints_of_more_ranks(results: Path, strategy: str, world: int) -> None:
    assert_ok(saved(results, f"{strategy} {SYNC} {LARGE} precision=bf16_mixed world_size={world}").row)


@pytest.mark.parametrize(
    ("fault", "words", "problem"),
    [
        (faults.loss_scale_not_loaded, f"ddp {SYNC} precision=fp16_mixed", "of the loss scaler"),
        (faults.position_not_loaded, f"ddp {SYNC}", "the number of the next batch"),
        (faults.second_moments_left_out, f"fsdp_full_shard {SYNC}", "exp_avg_sq of"),
        (faults.moments_not_loaded, f"zero1 {SYNC}", "the master of"),
        (faults.random_numbers_not_loaded, DROPPING, "the loss"),
    ],
)
def test_what_a_checkpoint_lacks_is_noticed(results: Path, fault: Entry, words: str, problem: str) -> None:
    record = saved(results, words, fault)
    assert_not_proven(record, problem)
    assert any(text.startswith("checkpoint: ") for text in record.proof["problems"])
    assert not run_folder(results, record).checkpoint.exists()


def test_a_rank_that_dies_while_it_saves_leaves_no_files(results: Path) -> None:
    record = saved(results, f"ddp {SYNC}", faults.killed_while_saving)
    assert record.status == "error" and record.row["failed_in_phase"] == "saving"
    assert not run_folder(results, record).checkpoint.exists()


def test_a_killed_command_leaves_no_files(tmp_path: Path) -> None:
    """Its ranks die with it, and remove what they were writing or reading."""
    words = ("strategy=ddp", SYNC, "world_size=2", "proof.reference=false", *TINY, f"results_dir={tmp_path}")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = subprocess.Popen([sys.executable, "-m", "harness", *words], cwd=ROOT, **quiet)
    deadline = time.monotonic() + 200
    while not [*tmp_path.glob("*/*/checkpoint/position*")] and command.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    command.kill()
    assert command.wait() < 0
    while [*tmp_path.glob("*/*/checkpoint")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
