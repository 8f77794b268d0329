"""The tests of train.compile: the compiled code is timed, counted and proven."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.worker import main as worker_main
from tests.support import faults
from tests.support.commands import assert_not_proven, run_with

SHORT = ("train.compile=true", "train.steps=1", "train.warmup_steps=2", "model.num_hidden_layers=2", "train.seq_len=64")


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "single world_size=1",
        "fsdp_full_shard",
        "ddp",
        "ddp checkpointing=full",
        "ddp model.attention=eager",
        "tp_sp checkpointing=full",
        "zero3 checkpointing=every_n checkpointing.every=2",
        "cp",
        "ddp precision=bf16_mixed",
        "pp_1f1b",
        "tp",
        "tp_sp",
        "zero1",
        "zero3",
    ],
)
def test_a_compiled_run_is_counted_exactly(results: Path, strategy: str) -> None:
    """Compiled products remain operators, so that operations, memory and volume are exact; the reference is eager."""
    record = run_with(results, worker_main.main, *SHORT, *f"strategy={strategy}".split())
    row = record.row
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["compile"] is True and row["attention_kernel"] == ("eager" if "eager" in strategy else "flash")
    assert row["grad_deviation"] < (1e-4 if row["precision"] == "fp32" else 0.1)
    least = 0.9 if strategy == "cp" else 1  # it skips scores that the mask hides
    most = 1.4 if "checkpointing" in strategy else 1.1
    assert least <= row["executed_flops"] / row["model_flops"] < most
    parts = [size for name, size in row.items() if name.startswith("at_peak_") and name.endswith("_bytes")]
    assert sum(parts) == row["peak_allocated_bytes"] > 0
    assert row.get("predicted_peak_bytes") is None


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (faults.never_compiled, "ran its layers operator by operator"),
        pytest.param(faults.compiled_again, "in the timed steps", marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_not_compiled_is_an_error(results: Path, fault: Callable[[str], None], problem: str) -> None:
    assert_not_proven(run_with(results, fault, *SHORT, "strategy=ddp"), problem)
