"""Every precision means the same in every layout: data types, masters, loss scaling, and the bound on gradients."""

from pathlib import Path

import pandas as pd
import pytest

from tests.support import row_invariants
from tests.support.combinations import in_precision
from tests.support.commands import read_rows, run_folder, run_harness

SMALL = ("train.global_batch=4", "train.micro_batch=2", "train.seq_len=32", "train.steps=1", "train.warmup_steps=2")

# Bytes per parameter of parameters and optimizer at rest if nothing is sharded; a sharded engine trains its masters.
STATE = {"bf16": (2, 4), "fp16_mixed": (2, 12), "bf16_mixed": (2, 12)}

BOUND = {"bf16": 3e-2, "fp16_mixed": 1e-2, "bf16_mixed": 0.1}


@pytest.mark.parametrize(
    "precision", ["bf16_mixed", *(pytest.param(name, marks=pytest.mark.long) for name in ("fp16_mixed", "bf16"))]
)
def test_a_precision_is_the_same_in_every_layout(results: Path, precision: str) -> None:
    records = [combination.record(results) for combination in in_precision(precision)]
    for record in records:
        ranks = run_folder(results, record).read_rank_reports(record.row["world_size"])
        row_invariants.check_memory(record.row, ranks)
    rows = pd.DataFrame([record.row for record in records]).set_index("strategy")
    assert set(rows.status) == {"ok"} and set(rows.skipped_steps) == {0}
    whole = rows.loc[["single", "ddp"]]
    parameters, optimizer = STATE[precision]
    assert (whole.parameter_bytes == parameters * whole.parameters).all()
    assert (whole.optimizer_bytes == optimizer * whole.parameters).all()
    assert rows.drop("single").grad_deviation.min() >= 0 and 0 < rows.grad_deviation.max() < BOUND[precision]


def test_overflowed_steps_are_skipped_in_every_layout(tmp_path: Path) -> None:
    """The scale is halved until gradients fit; skipped steps are counted, and the rest is proven as usual."""
    overrides = ("precision=fp16_mixed", "precision.initial_loss_scale=4e6", "train.warmup_steps=8", "world_size=2")
    layouts = "strategy=ddp,fsdp_full_shard,pp_1f1b"
    done = run_harness(tmp_path, "-m", "name=o", layouts, *SMALL, *overrides)
    assert done.returncode == 0, done.stdout[-2000:]
    rows = read_rows(tmp_path, "o")
    assert set(rows.status) == {"ok"}
    assert rows.skipped_steps.nunique() == 1 and rows.skipped_steps.min() >= 2
    assert rows.grad_deviation.max() < BOUND["fp16_mixed"]


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_an_overflow_in_the_profiled_step_profiles_it_again(steps: int, tmp_path: Path) -> None:
    """The scale doubles after every step that fits, so that every other step overflows: of two lengths one's last."""
    overrides = ("precision=fp16_mixed", "precision.initial_loss_scale=4e6", "precision.loss_scale_window=1")
    layouts = "strategy=fsdp_full_shard,zero1"
    lengths = (*SMALL, "train.warmup_steps=8", f"train.steps={steps}")
    done = run_harness(tmp_path, "-m", "name=o", layouts, *lengths, *overrides, "world_size=2")
    assert done.returncode == 0, done.stdout[-2000:]
    assert read_rows(tmp_path, "o").skipped_steps.min() >= 6


def test_a_loss_scale_that_never_fits_is_an_error(tmp_path: Path) -> None:
    overrides = ("precision=fp16_mixed", "precision.initial_loss_scale=1e30", "strategy=single")
    done = run_harness(tmp_path, "name=never", *SMALL, *overrides)
    assert done.returncode == 1
    assert "precision.initial_loss_scale is too large" in read_rows(tmp_path, "never").reason[0]
