"""Honest runs are proven at any learning rate, and a little scaled matrix is an error at any size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.records.rank_report import RankReport
from harness.records.run_folder import RunFolder
from harness.worker import main as worker_main
from tests.support import faults
from tests.support.commands import COMPARISON, assert_not_proven, run_folder, run_with
from tests.support.noise_floors import SIZES
from tests.support.scaled_matrices import excess_by_fault

FAST = "train.lr=1e-2"  # thirty times the default

# Two micro-batches of 4,096 tokens, in which the most frequent id of the text is some 700 times.
MANY_TOKENS = (
    *("precision=bf16_mixed", "data=text", "model.context_length=512", "train.seq_len=512"),
    *("train.global_batch=16", "train.micro_batch=8", "train.steps=1", "train.warmup_steps=1"),
)

Fault = Callable[[str], None]


def reference_of(results: Path, note: str) -> RankReport:
    """Return the report of the single process that a run was compared with."""
    (run_id,) = [word.strip(",") for word in note.split() if word.startswith("single-")]
    (report,) = RunFolder(results / COMPARISON / "references" / run_id).read_rank_reports(1)
    return report


@pytest.mark.long
def test_an_honest_run_at_a_high_learning_rate_is_proven_to_a_step(results: Path) -> None:
    """Its gradients deviate by more than any fixed bound that tells an honest run from a wrong one."""
    record = run_with(results, worker_main.main, "strategy=tp", "precision=bf16_mixed", FAST)
    row = record.row
    assert record.status == "ok", row["reason"]
    assert row["grad_deviation"] > 0.1 and row["grad_floor"] > 0.1
    assert 1 <= row["proven_steps"] < 6
    report = reference_of(results, record.proof["reference"])
    perturbed = report.perturbed
    assert perturbed is not None and len(perturbed.losses) == len(report.losses)
    assert perturbed.losses != report.losses and perturbed.losses[0] == pytest.approx(report.losses[0], rel=1e-3)
    assert {entry.name for entry in perturbed.first_updates} == {entry.name for entry in report.first_updates}


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_every_scaled_matrix_is_an_error_with_thousands_of_tokens(results: Path, family: str) -> None:
    """Kernels that sum tokens in 16 bits moved the embedding's norm by 8 %, and proved no step."""
    record = run_with(results, worker_main.main, "strategy=tp", f"model.family={family}", *MANY_TOKENS)
    assert record.status == "ok", record.row["reason"]
    assert record.row["proven_steps"] == 5
    reference = reference_of(results, record.proof["reference"])
    excesses = excess_by_fault(reference, run_folder(results, record).read_rank_reports(2), "bfloat16")
    assert {"embed_tokens.weight", "lm_head.weight"} < {name for _, name in excesses}
    assert min(excesses.values()) > 2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_little_scaled_gradient_of_the_embedding_is_an_error(results: Path, strategy: str) -> None:
    record = run_with(results, faults.embedding_gradient_scaled, f"strategy={strategy}", *MANY_TOKENS)
    assert_not_proven(record, "embed_tokens.weight's first ")


@pytest.mark.parametrize(
    ("fault", "overrides", "problem"),
    [
        (faults.update_scaled, "strategy=ddp", "mlp.up_proj.weight's first updates"),
        (faults.gradient_scaled, "strategy=tp precision=bf16_mixed train.lr=1e-2", "mlp.up_proj.weight's first "),
        *(
            pytest.param(fault, f"{layout} {precision} {SIZES[size]}", problem, marks=pytest.mark.long)
            for size in ("0.5", "11")
            for layout in ("strategy=zero2", "strategy=tp")
            for precision in ("precision=fp32", "precision=bf16_mixed")
            for fault, problem in (
                (faults.gradient_scaled, "mlp.up_proj.weight's first "),
                (faults.update_scaled, "mlp.up_proj.weight's first updates"),
            )
        ),
    ],
)
def test_a_little_scaled_matrix_is_an_error(results: Path, fault: Fault, overrides: str, problem: str) -> None:
    record = run_with(results, fault, "world_size=2", *overrides.split())
    assert_not_proven(record, problem)
    problems = record.proof["problems"]
    assert all("deviates by" in text for text in problems), problems
