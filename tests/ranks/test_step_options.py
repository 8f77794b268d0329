"""Options of a step: loss in chunks, the optimizer's kernel, compiled layers, precision, and any learning rate."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch

from harness.config.schema import PrecisionConfig
from harness.cost_model.memory import estimate_memory, saved_bytes
from harness.measure.activations import ActivationMeter
from harness.models.activation_checkpoint import apply_loss_chunks
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import materialize
from harness.probe import Probe
from harness.records.rank_report import RankReport
from harness.records.run_folder import RunFolder
from tests.support import faults, row_invariants
from tests.support.combinations import in_precision
from tests.support.commands import (
    COMPARISON,
    Entry,
    assert_not_proven,
    assert_ok,
    long,
    read_rows,
    run_folder,
    run_harness,
    run_with,
)
from tests.support.models import ADAM_FP32, BF16, FP32, Hearing, Live, layout_of, run, shaped
from tests.support.noise_floors import SIZES
from tests.support.scaled_matrices import excess_by_fault

CHUNKS = 4

SHORT = ("train.steps=1", "train.warmup_steps=2", "train.global_batch=4", "train.micro_batch=2", "train.seq_len=160")


@pytest.mark.parametrize("vocab_size", (256, 8000))
@pytest.mark.parametrize("precision", (FP32, BF16), ids=lambda precision: precision.name)
def test_a_chunked_loss_is_the_same_and_saves_one_chunk_of_logits(vocab_size: int, precision: PrecisionConfig) -> None:
    model = shaped(vocab_size=vocab_size, num_hidden_layers=2)
    module, probe = build_model(model), Probe()
    materialize(module, model, 0, torch.device("cpu"), getattr(torch, precision.compute))
    tokens = torch.randint(vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))
    expected = loss_function(module(tokens), tokens)
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    apply_loss_chunks(module, CHUNKS, probe)
    module.zero_grad(set_to_none=False)  # accumulated into, so counted by neither side
    with Live() as live:
        loss = module(tokens, tokens)
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = 1e-5 if precision is FP32 else 0.03
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max())
        )
    del loss
    with ActivationMeter(module).measure() as meter, probe.listen(Hearing(meter)):
        module(tokens, tokens).backward()
    config = run(model, precision, micro_batch=2, global_batch=4)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunks=CHUNKS))
    assert saved_bytes(config, layout_of(config, 0, 1), "cpu", 0)[0] == pytest.approx(meter.peak_bytes, rel=0.01)
    at_peak = estimate_memory(config, layout_of(config, 0, 1), ADAM_FP32).at_peak
    transient = sum(size for name, size in at_peak.items() if name not in ("parameters", "gradients", "optimizer"))
    assert transient - 8 * tokens.numel() == pytest.approx(live.peak_bytes, rel=0.03)


@pytest.mark.parametrize("strategy", (long("tp_sp"), "zero3"))
def test_a_chunked_loss_trains_the_same(results: Path, strategy: str) -> None:
    """If the sequence is sharded over ranks, the chunks are cut from the whole sequence (torchtitan issue 3412)."""
    record = run_with(results, *SHORT, f"strategy={strategy}", f"train.loss_chunks={CHUNKS}")
    row = record.row
    assert_ok(row)
    assert row["loss_deviation"] < 1e-5 and row["grad_deviation"] < 1e-4
    assert row["activation_bytes"] == pytest.approx(row["predicted_activation_bytes"], rel=0.03)
    for entry in record.traffic:
        assert entry["bytes"] == pytest.approx(entry["formula_bytes"], rel=0.001 if entry["axis"] == "tp" else 0.05)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ("single", "ddp", "zero1", "fsdp_full_shard", "fsdp_no_shard", "tp", "pp_1f1b"))
@pytest.mark.parametrize("chunks", (2, 5, 64))
def test_a_chunked_loss_is_proven_in_every_layout(results: Path, strategy: str, chunks: int) -> None:
    row = run_with(results, *SHORT, f"strategy={strategy}", f"train.loss_chunks={chunks}").row
    assert_ok(row)


@pytest.mark.parametrize("strategy", (long("ddp"), "tp"))
def test_temporaries_of_the_foreach_optimizer_are_predicted(results: Path, strategy: str) -> None:
    """The batch is so small that the peak is in the optimizer."""
    small = ("train.seq_len=16", "train.micro_batch=1", "train.global_batch=2", "train.steps=1", "train.warmup_steps=2")
    wide = ("model.hidden_size=256", "train.fused_optimizer=false")
    row = run_with(results, *small, *wide, f"strategy={strategy}").row
    assert_ok(row)
    assert row["peak_phase"] == "optimizer"
    assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.1)


@pytest.mark.parametrize("attention", ("flash", long("eager")))
def test_the_attention_kernel_is_the_observed_one(results: Path, attention: str) -> None:
    row = run_with(results, "strategy=pp_gpipe", f"model.attention={attention}").row
    assert (row["status"], row["reason"], row["attention_kernel"]) == ("ok", "", attention)


COMPILED = (
    "train.compile=true",
    "train.steps=1",
    "train.warmup_steps=2",
    "model.num_hidden_layers=2",
    "train.seq_len=64",
)


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
        "cp_ulysses",
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
    record = run_with(results, *COMPILED, *f"strategy={strategy}".split())
    row = record.row
    assert_ok(row)
    assert row["compile"] is True and row["attention_kernel"] == ("eager" if "eager" in strategy else "flash")
    assert row["grad_deviation"] < (1e-4 if row["precision"] == "fp32" else 0.1)
    least = 0.9 if strategy == "cp" else 1  # it skips scores that the mask hides
    most = 1.4 if "checkpointing" in strategy else 1.1
    assert least <= row["executed_flops"] / row["model_flops"] < most
    parts = [size for name, size in row.items() if name.startswith("at_peak_") and name.endswith("_bytes")]
    assert sum(parts) == row["peak_allocated_bytes"] > 0
    assert row.get("predicted_peak_bytes") is None


SMALLEST = (
    *("train.global_batch=4", "train.micro_batch=2", "train.seq_len=32", "train.steps=1", "train.warmup_steps=2"),
    "model.num_hidden_layers=2",
)

# Bytes per parameter of parameters and optimizer at rest if nothing is sharded; a sharded engine trains its masters.
STATE = {"bf16": (2, 4), "fp16_mixed": (2, 12), "bf16_mixed": (2, 12)}

BOUND = {"bf16": 3e-2, "fp16_mixed": 1e-2, "bf16_mixed": 0.1}


@pytest.mark.parametrize("precision", ["bf16_mixed", *(long(name) for name in ("fp16_mixed", "bf16"))])
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
    overrides = (
        "precision=fp16_mixed",
        f"precision.initial_loss_scale={2**22}",
        "train.warmup_steps=8",
        "world_size=2",
    )
    layouts = "strategy=ddp,fsdp_full_shard,pp_1f1b" + ",zero2,zero3" * torch.ops.mkldnn._is_mkldnn_fp16_supported()
    done = run_harness(tmp_path, "-m", "name=o", layouts, *SMALLEST, *overrides)
    assert done.returncode == 0, done.stdout[-2000:]
    rows = read_rows(tmp_path, "o")
    assert set(rows.status) == {"ok"}
    assert rows.skipped_steps.nunique() == 1 and rows.skipped_steps.min() >= 2
    assert rows.grad_deviation.max() < BOUND["fp16_mixed"]


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_an_overflow_in_the_profiled_step_profiles_it_again(steps: int, tmp_path: Path) -> None:
    """The scale doubles after every step that fits, so that every other step overflows: of two lengths one's last."""
    overrides = ("precision=fp16_mixed", f"precision.initial_loss_scale={2**22}", "precision.loss_scale_window=1")
    layouts = "strategy=fsdp_full_shard" + ",zero1" * torch.ops.mkldnn._is_mkldnn_fp16_supported()
    lengths = (*SMALLEST, "train.warmup_steps=8", f"train.steps={steps}")
    done = run_harness(tmp_path, "-m", "name=o", layouts, *lengths, *overrides, "world_size=2")
    assert done.returncode == 0, done.stdout[-2000:]
    assert read_rows(tmp_path, "o").skipped_steps.min() >= 6


def test_a_loss_scale_that_never_fits_is_an_error(tmp_path: Path) -> None:
    overrides = ("precision=fp16_mixed", "precision.initial_loss_scale=1e30", "strategy=single")
    done = run_harness(tmp_path, "name=never", *SMALLEST, *overrides)
    assert done.returncode == 1
    assert "precision.initial_loss_scale is too large" in read_rows(tmp_path, "never").reason[0]


# Two micro-batches of 4,096 tokens, in which the most frequent id of the text is some 700 times.
MANY_TOKENS = (
    *("precision=bf16_mixed", "data=text", "model.context_length=512", "train.seq_len=512"),
    *("train.global_batch=16", "train.micro_batch=8", "train.steps=1", "train.warmup_steps=1"),
)


def reference_of(results: Path, note: str) -> RankReport:
    """Return the report of the single process that a run was compared with."""
    (run_id,) = [word.strip(",") for word in note.split() if word.startswith("single-")]
    (report,) = RunFolder(results / COMPARISON / "references" / run_id).read_rank_reports(1)
    return report


@pytest.mark.long
def test_an_honest_run_at_a_high_learning_rate_is_proven_to_a_step(results: Path) -> None:
    """At thirty times the default gradients deviate by more than any fixed bound that tells it from a wrong run."""
    record = run_with(results, "strategy=tp", "precision=bf16_mixed", "train.lr=1e-2")
    row = record.row
    assert_ok(row)
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
    record = run_with(results, "strategy=tp", f"model.family={family}", *MANY_TOKENS)
    assert_ok(record.row)
    assert record.row["proven_steps"] == 5
    reference = reference_of(results, record.proof["reference"])
    excesses = excess_by_fault(reference, run_folder(results, record).read_rank_reports(2), "bfloat16")
    assert {"embed_tokens.weight", "lm_head.weight"} < {name for _, name in excesses}
    assert min(excesses.values()) > 2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_little_scaled_gradient_of_the_embedding_is_an_error(results: Path, strategy: str) -> None:
    record = run_with(results, f"strategy={strategy}", *MANY_TOKENS, entry=faults.embedding_gradient_scaled)
    assert_not_proven(record, "embed_tokens.weight's ")


@pytest.mark.parametrize(
    ("fault", "overrides", "problem"),
    [
        (faults.update_scaled, "strategy=ddp", "mlp.up_proj.weight's first updates"),
        (faults.gradient_scaled, "strategy=tp precision=bf16_mixed train.lr=1e-2", "mlp.up_proj.weight's "),
        *(
            long(fault, f"{layout} {precision} {SIZES[size]}", problem)
            for size in ("0.5", "11")
            for layout in ("strategy=zero2", "strategy=tp")
            for precision in ("precision=fp32", "precision=bf16_mixed")
            for fault, problem in (
                (faults.gradient_scaled, "mlp.up_proj.weight's "),
                (faults.update_scaled, "mlp.up_proj.weight's first updates"),
            )
        ),
    ],
)
def test_a_little_scaled_matrix_is_an_error(results: Path, fault: Entry, overrides: str, problem: str) -> None:
    record = run_with(results, *overrides.split(), entry=fault)
    assert_not_proven(record, problem)
    problems = record.proof["problems"]
    assert all("deviates by" in text or "is not that of AdamW" in text for text in problems), problems
