"""Faults of dropout: masks that are missing, have other zeros, or are alike or apart where they must not be."""

from pathlib import Path

import pytest

from tests.support import faults
from tests.support.commands import Entry, assert_not_proven, run_with, with_larger

DROPPED = "model=gpt_tiny model.dropout=0.1 model.num_hidden_layers=2"

# About five million parameters.
LARGER = (
    "model.hidden_size=288 model.num_attention_heads=6 model.num_key_value_heads=6 model.intermediate_size=1152"
    " model.num_hidden_layers=5 train.seq_len=128 train.global_batch=8"
)

HEADS = "the heads of rank 0 drew the masks of tensor-parallel ranks [None], and [0] are expected"

FAULTS = [
    (faults.too_much_dropped, "ddp", "of its activations, and model.dropout=0.1"),
    (faults.outputs_of_mlps_not_dropped, "ddp", "drew masks of"),
    (faults.evaluated, "ddp", "drew masks of 0 elements"),
    (faults.masks_alike, "ddp", "drew the same masks"),
    (faults.masks_of_their_own, "tp", "ranks that share activations drew different masks"),
    (faults.other_masks_recomputed, "ddp checkpointing=full", "second forwards are not those of the first ones"),
]

FURTHER = [
    (faults.heads_drop_alike, "tp", HEADS),
    (faults.embeddings_dropped_apart, "tp", "the global gradient norm is not the same"),
]


@pytest.mark.parametrize(("fault", "strategy", "problem"), with_larger(FAULTS, LARGER, FURTHER))
def test_a_fault_of_dropout_is_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    assert_not_proven(run_with(results, *DROPPED.split(), *f"strategy={strategy}".split(), entry=fault), problem)
