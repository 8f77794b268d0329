"""The options train.loss_chunks and train.fused_optimizer: what they compute and keep, and real ranks that prove it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.config.schema import PrecisionConfig
from harness.cost_model.memory import activation_bytes, estimate_memory
from harness.measure.activations import ActivationMeter
from harness.models.activation_checkpoint import apply_loss_chunks
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import materialize
from harness.probe import Probe
from harness.worker import main as worker_main
from tests.support import faults
from tests.support.commands import assert_not_proven, run_with
from tests.support.models import ADAM_FP32, BF16, FP32, Hearing, Live, layout_of, run, shaped

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
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max())
        )
    del loss
    with ActivationMeter(module) as meter, probe.listen(Hearing(meter)):
        module(tokens, tokens).backward()
    config = run(model, precision, micro_batch=2, global_batch=4)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunks=CHUNKS))
    assert activation_bytes(config, layout_of(config, 0, 1), "cpu", 0) == pytest.approx(meter.peak_bytes, rel=0.01)
    at_peak = estimate_memory(config, layout_of(config, 0, 1), ADAM_FP32).at_peak
    transient = sum(size for name, size in at_peak.items() if name not in ("parameters", "gradients", "optimizer"))
    assert transient - 8 * tokens.numel() == pytest.approx(live.peak_bytes, rel=0.03)


@pytest.mark.parametrize("strategy", (pytest.param("tp_sp", marks=pytest.mark.long), "zero3"))
def test_a_chunked_loss_trains_the_same(results: Path, strategy: str) -> None:
    """If the sequence is sharded over ranks, the chunks are cut from the whole sequence (torchtitan issue 3412)."""
    record = run_with(results, worker_main.main, *SHORT, f"strategy={strategy}", f"train.loss_chunks={CHUNKS}")
    row = record.row
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["loss_deviation"] < 1e-5 and row["grad_deviation"] < 1e-4
    assert row["activation_bytes"] == pytest.approx(row["predicted_activation_bytes"], rel=0.03)
    for entry in record.traffic:
        assert entry["bytes"] == pytest.approx(entry["formula_bytes"], rel=0.001 if entry["axis"] == "tp" else 0.05)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ("single", "ddp", "zero1", "fsdp_full_shard", "fsdp_no_shard", "tp", "pp_1f1b"))
@pytest.mark.parametrize("chunks", (2, 5, 64))
def test_a_chunked_loss_is_proven_in_every_layout(results: Path, strategy: str, chunks: int) -> None:
    row = run_with(results, worker_main.main, *SHORT, f"strategy={strategy}", f"train.loss_chunks={chunks}").row
    assert (row["status"], row["reason"]) == ("ok", "")


@pytest.mark.parametrize("strategy", ("ddp", "tp"))
def test_temporaries_of_the_foreach_optimizer_are_predicted(results: Path, strategy: str) -> None:
    """The batch is so small that the peak is in the optimizer."""
    small = ("train.seq_len=16", "train.micro_batch=1", "train.global_batch=2", "train.steps=1", "train.warmup_steps=2")
    wide = ("model.hidden_size=256", "train.fused_optimizer=false")
    row = run_with(results, worker_main.main, *small, *wide, f"strategy={strategy}").row
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["peak_phase"] == "optimizer"
    assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.1)


@pytest.mark.parametrize("attention", ("flash", pytest.param("eager", marks=pytest.mark.long)))
def test_the_attention_kernel_is_the_observed_one(results: Path, attention: str) -> None:
    row = run_with(results, worker_main.main, "strategy=pp_gpipe", f"model.attention={attention}").row
    assert (row["status"], row["reason"], row["attention_kernel"]) == ("ok", "", attention)


@pytest.mark.parametrize(
    ("fault", "overrides", "problem"),
    [
        (faults.parts_of_the_loss_kept, f"strategy=ddp train.loss_chunks={CHUNKS}", "0 second forwards"),
        (faults.parts_of_the_loss_mixed, f"strategy=tp_sp train.loss_chunks={CHUNKS}", "loss deviates"),
        (
            faults.other_kernel_of_the_optimizer,
            "strategy=ddp train.fused_optimizer=false",
            "ran the optimizer as fused",
        ),
        (
            faults.eager_on_one_rank,
            "strategy=ddp",
            "attention ran as flash and math, and not as one kernel on all ranks",
        ),
    ],
)
def test_another_step_than_configured_is_an_error(
    results: Path, fault: Callable[[str], None], overrides: str, problem: str
) -> None:
    batch = SHORT if "loss_chunks" in overrides else ()
    assert_not_proven(run_with(results, fault, *batch, *overrides.split()), problem)
