"""State and activations on the host: what real ranks hold and where."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.command import read_run_config
from harness.cost_model.memory import estimate_memory, saved_bytes
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.stage_activations import stage_activations
from harness.engines.base import load_engine
from harness.engines.torch.grad_norm import squared_grad_norm
from harness.hardware.machine import Machine
from harness.layout.layout import resolve_layout
from harness.layout.partition import whole_model
from harness.measure.activations import ActivationMeter
from harness.models.activation_checkpoint import apply_checkpointing
from harness.models.activation_offload import offload_activations
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import materialize
from harness.probe import Listener, Probe
from harness.proof.layout import placement_problems
from harness.records.rank_report import RankReport
from harness.tensors.fp32_sums import sums_of_squares
from harness.util.text import UserError
from tests.support import commands, row_invariants
from tests.support.capacity import capacity_problem
from tests.support.commands import assert_ok, compose_config, compose_layout, widths_of

MOMENTS = 2 * 4  # bytes per parameter that AdamW keeps beside masters

CPU = torch.device("cpu")

ACTIVATIONS = "checkpointing.offload_activations=true"


CASES = [
    "strategy=zero_offload",
    "strategy=zero_offload precision=bf16_mixed",
    "strategy=zero1 strategy.offload=optimizer",
    f"strategy=zero3 strategy.offload=parameters checkpointing=full {ACTIVATIONS}",
    f"strategy=fsdp_full_shard strategy.offload=parameters precision=bf16_mixed {ACTIVATIONS}",
    f"strategy=pp_zero_bubble checkpointing=full {ACTIVATIONS}",
    # One narrow layer a stage: what the embedding keeps, and is not moved, would show.
    "strategy=pp_gpipe model=gpt_tiny model.hidden_size=64 model.num_hidden_layers=2 precision=bf16_mixed"
    f" train.micro_batch=1 checkpointing=full {ACTIVATIONS}",
]

LONG = [
    f"strategy=cp model=gpt_tiny model.attention=eager {ACTIVATIONS}",  # no keys are repeated
    f"strategy=tp_sp model.num_key_value_heads=4 {ACTIVATIONS}",
    "strategy=zero3 strategy.offload=optimizer precision=bf16_mixed",
    "strategy=zero2_defaults strategy.offload=optimizer",
    "strategy=zero3_defaults strategy.offload=parameters",
    "strategy=fsdp_shard_grad_op strategy.offload=parameters",
    "strategy=fsdp_no_shard strategy.offload=parameters",
    f"strategy=ddp model.attention=eager precision=bf16_mixed {ACTIVATIONS}",
    f"strategy=ddp strategy.engine=accelerate {ACTIVATIONS}",
    f"strategy=pp_interleaved {ACTIVATIONS}",
    f"strategy=pp_gpipe precision=bf16_mixed {ACTIVATIONS}",
    f"strategy=tp model.num_key_value_heads=4 checkpointing=full {ACTIVATIONS}",
]


@pytest.mark.parametrize("case", CASES)
def test_offload_is_proven_and_predicted(results: Path, case: str) -> None:
    check(results, f"model.num_hidden_layers=2 {case}", world=2)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES + LONG)
def test_offload_is_proven_in_every_layout(results: Path, case: str, world: int) -> None:
    check(results, f"{case} model.num_hidden_layers=8", world)


def check(results: Path, case: str, world: int) -> None:
    """Check that figures and formulas hold as without offload, which on a CPU saves nothing and must lose nothing."""
    record = commands.run_with(results, f"world_size={world}", *case.split())
    row = record.row
    assert_ok(row)
    if row["precision"] == "fp32":
        assert row["loss_deviation"] < 1e-5 and row["grad_deviation"] < 1e-4
    config = read_run_config(record.config)
    layout = resolve_layout(config.strategy, world)
    widths = widths_of(config, layout)
    share = row["parameters"] / layout.dp_shard
    if layout.offload != "none" and config.strategy.literature:
        least = widths.gradients * row["parameters"] / layout.shard_count("gradients") + widths.host_gradients * share
        allowed = 1.02 * least + 4 * widths.host_gradients * config.model.vocab_size * config.model.hidden_size
        assert 0.98 * least <= row["gradient_bytes"] <= allowed
        assert row["optimizer_bytes"] == pytest.approx((widths.masters + MOMENTS) * share, rel=0.02)
    assert row["activation_bytes"] == pytest.approx(row["predicted_activation_bytes"], rel=0.03)
    moved = max(saved_bytes(config, layout, "cpu", stage)[1] for stage in range(layout.pp))
    assert (row["offloaded_activation_bytes"] or 0) == moved
    assert row["offloaded_bytes"] is None  # the device is the host
    ranks = commands.run_folder(results, record).read_rank_reports(world)
    row_invariants.check_memory(row, ranks)
    row_invariants.check_bytes(record)


def rank_on_gpu(**placed: dict[str, int]) -> RankReport:
    return RankReport(device_name="NVIDIA H200", host_state=["gradients", "optimizer"], state_bytes_by_device=placed)


def test_state_on_the_wrong_device_is_a_problem() -> None:
    _, layout = compose_layout(1, "strategy=zero_offload", "world_size=1")
    right = {"parameters": {"cuda": 8}, "gradients": {"cpu": 4}, "optimizer": {"cpu": 12}}
    assert not any(placement_problems(layout, [rank_on_gpu(**right)]))
    (on_device,) = placement_problems(layout, [rank_on_gpu(**right | {"optimizer": {"cpu": 8, "cuda": 4}})])
    assert on_device == "optimizer: rank 0 holds 4 bytes on cuda, and strategy.offload=optimizer places them on cpu"
    (moved_too,) = placement_problems(layout, [rank_on_gpu(**right | {"parameters": {"cpu": 8}})])
    assert moved_too == "parameters: rank 0 holds 8 bytes on cpu, and strategy.offload=optimizer places them on cuda"
    without_offload = dataclasses.replace(layout, offload="none")
    assert len(list(placement_problems(without_offload, [rank_on_gpu(**right)]))) == 3


def test_nn_data_parallel_refuses_activation_offload() -> None:
    gpus = Machine("cuda", "NVIDIA H200", 1, 2, devices=2, free_bytes=(2**34,) * 2, cores=2)
    config = compose_config("strategy=dp", "train.micro_batch=2", ACTIVATIONS)
    (problem,) = load_engine("nn_data_parallel").unsupported(config, resolve_layout(config.strategy, 1), gpus)
    assert problem.startswith("checkpointing.offload_activations=true is lost when nn.DataParallel copies the model")


@pytest.mark.parametrize("strategy", ["zero_offload", "zero3 strategy.offload=parameters", "fsdp_full_shard"])
def test_offloaded_state_is_not_planned_on_the_gpu(strategy: str) -> None:
    offload = () if "zero" in strategy else ("strategy.offload=parameters",)
    config, layout = compose_layout(
        8, f"strategy={strategy.split()[0]}", *strategy.split()[1:], *offload, "model=7b", ACTIVATIONS
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=8, micro_batch=1))
    widths = widths_of(config, layout)
    on_gpu, on_cpu = (estimate_memory(config, layout, widths, device) for device in ("cuda", "cpu"))
    share = config.model.parameters / 8
    state = (
        widths.masters + MOMENTS + widths.host_gradients + widths.parameters * ("parameters" in layout.offloaded_state)
    ) * share
    moved = saved_bytes(config, layout, "cuda", 0)[1]
    assert on_gpu.host_bytes == pytest.approx(state + widths.host_buffer_bytes + moved, rel=1e-3)
    assert on_gpu.at_peak.keys().isdisjoint({"optimizer", *layout.offloaded_state} - {"gradients"})
    assert on_cpu.host_bytes == 0 and on_cpu.peak_bytes > on_gpu.peak_bytes + 0.9 * state
    without_offload = dataclasses.replace(
        config, checkpointing=dataclasses.replace(config.checkpointing, offload_activations=False)
    )
    on_device = saved_bytes(config, layout, "cuda", 0)[0]
    of_last_layer = moved // config.model.num_hidden_layers
    rest = saved_bytes(without_offload, layout, "cuda", 0)[0] - moved
    # In the last layer's backward its own part is there, and that of the layer before is on its way back.
    assert rest + of_last_layer <= on_device <= rest + 2 * of_last_layer
    assert saved_bytes(without_offload, layout, "cpu", 0)[0] == saved_bytes(config, layout, "cpu", 0)[0]


def test_offload_beyond_the_hosts_memory_is_refused() -> None:
    config, layout = compose_layout(8, "strategy=zero_offload", "model=7b", "train.global_batch=8")
    widths = widths_of(config, layout)
    sizes = {"available_bytes": 2**40, "ranks_on_host": 8, "device": "cuda", "models": []}
    reason = capacity_problem(config, layout, widths, host_available_bytes=64 * 2**30, **sizes)  # type: ignore[arg-type]
    assert reason is not None and reason.startswith("strategy.offload=optimizer of model=7b needs ")
    assert "8 ranks of the host" in reason and "64.0 GiB are available: choose" in reason
    assert capacity_problem(config, layout, widths, host_available_bytes=2**40, **sizes) is None  # type: ignore[arg-type]


class Counted(Listener):
    def __init__(self, meter: ActivationMeter) -> None:
        self.meter = meter
        self.copies = 0

    def recompute(self) -> Any:
        return self.meter.recompute()

    def offloaded(self, tensor: torch.Tensor) -> None:
        self.copies += 1
        self.meter.offloaded(tensor)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_storage_is_copied_once_and_gradients_are_the_same_bits(checkpointing: str) -> None:
    config = compose_config(f"checkpointing={checkpointing}", "train.seq_len=32")
    tokens = torch.arange(64).view(2, 32) * 7 % config.model.vocab_size
    gradients, device_bytes = [], []
    for offload in (False, True):
        probe, model = Probe(), build_model(config.model)
        apply_checkpointing(model, config.checkpointing, probe)
        if offload:
            offload_activations(model, probe)
        materialize(model, config.model, 0, CPU, torch.float32)
        meter = ActivationMeter(model, device=torch.device("cuda"))  # on which nothing lies: the host is not counted
        probe.listener = counted = Counted(meter)
        with meter.measure():
            loss = loss_function(model(tokens), tokens)
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        device_bytes.append(meter.peak_bytes)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]
    shape = MicroBatchShape(config.model, 2, 32, "float32")
    stage = whole_model(config.model)
    own = stage_activations(shape, stage, config.checkpointing)
    expected = own.kept_by(stage.layers) - 64 * 8  # token ids stay
    assert meter.peak_offloaded_bytes == expected and device_bytes == [0, 0]
    layers = config.model.num_hidden_layers
    assert counted.copies == (layers + 2 if checkpointing == "full" else counted.copies)
    assert meter._offloaded_bytes == meter.saved_bytes == 0 and not meter._offloaded


def test_a_tensor_changed_after_it_was_copied_is_copied_again() -> None:
    """Two layers save one storage that is changed between them, and backward needs both of its states."""

    class Square(torch.nn.Module):
        def forward(self, factor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
            return factor * data

    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({str(index): Square() for index in range(2)})
    model.layers_by_index = lambda: dict(enumerate(model.layers.values()))
    offload_activations(model, Probe())
    factor, data = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    first = model.layers["0"](factor, data)
    data.add_(3.0)
    (first + model.layers["1"](factor, data)).sum().backward()
    assert factor.grad is not None and factor.grad.tolist() == [7.0] * 3


def test_an_unknown_key_of_checkpointing_is_refused() -> None:
    with pytest.raises(UserError, match="offload_activations"):
        compose_config("+checkpointing.offload_activation=true")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_gradient_norm_lies_on_the_device_in_fp32(dtype: torch.dtype) -> None:
    """The norm is in fp32 whatever the gradients' data type, because 16 bits cannot represent 3001."""
    gradients = [torch.ones(3001, dtype=dtype), torch.full((2,), 0.5, dtype=dtype)]
    squares = [*sums_of_squares(gradients)]
    assert squared_grad_norm(gradients, squares, torch.device("cpu")).item() == pytest.approx(3001.5, rel=1e-6)
    assert squared_grad_norm(gradients, squares, torch.device("meta")).device.type == "meta"
