"""The memory prediction along the tensor and pipeline axes, compared with DTensor and torch's halves of a backward."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import GraphExecGroup

from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionConfig
from harness.config.schema import RunConfig
from harness.cost_model.activations import block_tensors, logits_bytes, loss_tensors
from harness.cost_model.capacity import capacity_problem
from harness.cost_model.memory import activation_bytes, estimate_memory, estimate_rank_memory
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.pipeline import backward_starts, schedule_order
from harness.cost_model.stage_activations import stage_activations
from harness.cost_model.stage_memory import backward_peaks, held_parameter_count, stage_costs, step_peaks
from harness.engines.torch.tensor_parallel import apply_tensor_parallel
from harness.layout.layout import Layout, resolve_layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages, tp_shard_dim, whole_model
from harness.measure.activations import ActivationMeter
from harness.models.activation_checkpoint import apply_checkpointing
from harness.models.build import build_model
from harness.models.init_weights import materialize
from harness.models.loss import loss_function
from harness.probe import Probe
from tests.support.models import ADAM_FP32, BF16, FP32, PREPARED, Live, Recomputing, built, model_named, run, shaped
from tests.support.schedules import laid_out
from tests.support.schedules import order as order_of_torch

MODEL = shaped(num_key_value_heads=4, vocab_size=330)  # four ranks cannot cut this vocabulary evenly

GPT = shaped("gpt_tiny", vocab_size=330)

FAMILIES = {"llama": MODEL, "gpt": dataclasses.replace(GPT, dropout=0.1)}

CPU = torch.device("cpu")

PRECISIONS = pytest.mark.parametrize("precision", (FP32, BF16), ids=lambda precision: precision.name)

PLACES = pytest.mark.parametrize("place", (0, pytest.param(1, marks=pytest.mark.long), 2))

CHECKPOINTINGS = pytest.mark.parametrize("checkpointing", ("none", "full"))


@contextmanager
def cut_model(
    tp: int, sequence_parallel: bool, precision: PrecisionConfig, checkpointing: str, model: ModelConfig
) -> Iterator[nn.Module]:
    """Return the first of tp ranks' shard of the model.

    The collectives of a fake group move nothing, but take the memory of real ones.
    """
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    try:
        module = build_model(model)
        apply_tensor_parallel(module, init_device_mesh("cpu", (tp,)), sequence_parallel)
        apply_checkpointing(module, CheckpointingConfig(checkpointing), Probe())
        materialize(module, model, 0, CPU, getattr(torch, precision.compute))
        with loss_parallel():
            yield module
    finally:
        dist.destroy_process_group()


def test_tensor_parallelism_halves_what_lies_between_matrices() -> None:
    one, two = (block_tensors(MicroBatchShape(MODEL, 2, 64, "float32", tp=tp)) for tp in (1, 2))
    norms = {name for name in one if "layernorm" in name}
    assert {name for name in one if two[name] == one[name]} == norms
    assert {name for name in one if 2 * two[name] == one[name]} == one.keys() - norms
    cut = block_tensors(MicroBatchShape(MODEL, 2, 64, "float32", tp=2, sequence_parallel=True))
    outputs = {name for name in norms if name.endswith(".output")}  # gathered for the projections
    assert {name for name in one if cut[name] == one[name]} == outputs
    assert {name for name in one if 2 * cut[name] == one[name]} == one.keys() - outputs


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("attention", ("flash", "eager"))
@pytest.mark.parametrize("family", FAMILIES)
@PRECISIONS
@CHECKPOINTINGS
def test_a_rank_of_tensor_parallelism_keeps_what_is_predicted(
    tp: int, sequence_parallel: bool, attention: str, family: str, precision: PrecisionConfig, checkpointing: str
) -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    model = dataclasses.replace(FAMILIES[family], attention=attention)
    with cut_model(tp, sequence_parallel, precision, checkpointing, model) as module:
        with ActivationMeter(module) as meter:
            loss = loss_function(module(tokens), tokens)
        measured = meter.saved_bytes
        del loss
    one = MicroBatchShape(model, 2, 64, precision.compute, tp=tp, sequence_parallel=sequence_parallel)
    targets_bytes = 8 * tokens.numel()
    kept = stage_activations(one, whole_model(model), CheckpointingConfig(checkpointing)).before_backward
    predicted = kept + logits_bytes(one) + targets_bytes
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("sizes", ({"vocab_size": 8000}, {"intermediate_size": 1024}, {"num_hidden_layers": 1}))
@pytest.mark.parametrize(("tp", "sequence_parallel"), ((2, False), (4, False), (4, True)))
@pytest.mark.parametrize("family", FAMILIES)
@PRECISIONS
@CHECKPOINTINGS
def test_peak_of_a_rank_of_tensor_parallelism(
    sizes: dict[str, int], tp: int, sequence_parallel: bool, family: str, precision: PrecisionConfig, checkpointing: str
) -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    model = dataclasses.replace(FAMILIES[family], **sizes)  # type: ignore[arg-type]
    with cut_model(tp, sequence_parallel, precision, checkpointing, model) as module:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with Live() as live:
            loss_function(module(tokens), tokens).backward()
    config = run(model, precision, checkpointing, micro_batch=2, global_batch=4, seq_len=64)
    layout = layout_of(config, tp=tp, sequence_parallel=sequence_parallel)
    at_peak = estimate_memory(config, layout, ADAM_FP32).at_peak
    transient = sum(size for name, size in at_peak.items() if name not in ("parameters", "gradients", "optimizer"))
    assert transient == pytest.approx(live.peak_bytes, rel=0.05)


def layout_of(config: RunConfig, **degrees: object) -> Layout:
    world_size = math.prod(size for name, size in degrees.items() if name in ("tp", "pp") and isinstance(size, int))
    strategy = dataclasses.replace(config.strategy, dp_shard=1, zero_stage=0, **degrees)  # type: ignore[arg-type]
    return resolve_layout(strategy, world_size)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("pp", (1, 2, 3))
@pytest.mark.parametrize("model", (MODEL, GPT), ids=("llama", "gpt"))
def test_parameters_are_those_of_the_plan_and_the_stage(model: ModelConfig, tp: int, pp: int) -> None:
    """The fullest rank has a tp-th of each matrix, rounded up; norms and biases after a sum are whole."""
    config = run(model)
    for stage in split_into_stages(model, layout_of(config, pp=pp)) if pp > 1 else [whole_model(model)]:
        expected = 0
        for name, shape in model_profile(model).parameter_shapes.items():
            cut = tp_shard_dim(name, model)
            local = [-(-size // tp) if index == cut else size for index, size in enumerate(shape)]
            expected += math.prod(local) if stage.holds(name) else 0
        assert held_parameter_count(model, stage, tp) == expected


# --- pipelines: passes kept, in torch's order


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    schedule=st.sampled_from((("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3))),
    p=st.integers(2, 8),
    rounds=st.integers(1, 4),
)
def test_passes_are_taken_in_torchs_order(schedule: tuple[str, int], p: int, rounds: int) -> None:
    layout = laid_out(schedule[0], p, schedule[1])
    expected = order_of_torch(layout, p * rounds)
    names = {"F": "forward", "B": "backward"}
    for place in range(p):
        turns = [(names[kind], stage // p) for stage, kind, _ in expected[place]]
        assert list(schedule_order(layout, p * rounds, place)) == turns


@pytest.mark.parametrize("v", (1, 2, 3))
@pytest.mark.parametrize("p", (2, 3, 4, 8))
def test_halved_backwards_are_taken_in_torchs_order(p: int, v: int) -> None:
    """The first stage's input needs no gradient, so torch runs its whole backward in place of the weights' half."""
    layout = laid_out("zero_bubble", p, v)
    expected = order_of_torch(layout, 3 * p)
    names = {"F": "forward", "I": "inputs", "W": "weights"}
    for place in range(p):
        turns = [
            ("backward", 0) if (stage, kind) == (0, "W") else (names[kind], stage // p)
            for stage, kind, _ in expected[place]
            if (stage, kind) != (0, "I")
        ]
        assert list(schedule_order(layout, 3 * p, place)) == turns


@pytest.mark.parametrize("micro_batches", (4, 6, 12))
@PRECISIONS
def test_gpipe_keeps_every_micro_batch_and_1f1b_those_of_the_stages_from_here(
    micro_batches: int, precision: PrecisionConfig
) -> None:
    p = 4
    config = run(shaped(num_hidden_layers=8), precision, global_batch=micro_batches)
    for place, stage in enumerate(split_into_stages(config.model, layout_of(config, pp=p))):
        one = MicroBatchShape(config.model, 1, 128, precision.compute)
        saved = stage_activations(one, stage, CheckpointingConfig("none")).before_backward
        kept = saved + logits_bytes(one) * stage.holds_head
        gpipe, one_f_one_b = (
            activation_bytes(config, layout_of(config, pp=p, schedule=schedule), "cpu", place)
            for schedule in ("gpipe", "1f1b")
        )
        assert gpipe == micro_batches * kept
        assert one_f_one_b == min(micro_batches, p - place) * kept


def test_interleaving_keeps_more_of_the_stages_that_come_first() -> None:
    """Four micro-batches go through stages 0 and 2 of rank 0 of 2: F0 F0 F2 F2 F0, and then a backward of stage 2.

    Stage 2 then has two passes, stage 0 three, and a fourth before stage 2's next backward.
    """
    config = run(shaped(num_hidden_layers=8), global_batch=4)
    layout = layout_of(config, pp=2, schedule="interleaved_1f1b", virtual_stages=2)
    one = MicroBatchShape(config.model, 1, 128, "float32")
    first, _, third, _ = (
        stage_activations(one, stage, CheckpointingConfig("none")).before_backward
        for stage in split_into_stages(config.model, layout)
    )
    assert activation_bytes(config, layout, "cpu", 0) == max(3 * first + 2 * third, 4 * first + third)


@pytest.mark.parametrize(("schedule", "virtual"), (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)))
def test_every_micro_batch_has_its_buffers(schedule: str, virtual: int) -> None:
    config = run(shaped(num_hidden_layers=8), BF16, global_batch=6)
    layout = layout_of(config, pp=2, schedule=schedule, virtual_stages=virtual)
    found = estimate_memory(config, layout, ADAM_FP32)
    ends = 2 * virtual - 1  # each of a rank's stages receives from both sides, less one end of the model
    assert found.communication_buffer_bytes == ends * 6 * 128 * config.model.hidden_size * 2


@pytest.mark.parametrize(("schedule", "sent", "back"), (("gpipe", 4, 3), ("1f1b", 1, 1), ("zero_bubble", 4, 3)))
def test_what_was_sent_piles_up_in_all_schedules_but_one(schedule: str, sent: int, back: int) -> None:
    """Before the last of four backwards of two stages, all outputs and three gradients have been sent."""
    config = run(MODEL, BF16, global_batch=4)  # on a CPU it keeps fp32 copies of inputs, not what it received
    layout = layout_of(config, pp=2, schedule=schedule)
    for place, (stage, expected) in enumerate(zip(split_into_stages(MODEL, layout), (sent, back), strict=True)):
        parts = stage_costs(config, layout, "cpu", [stage])
        last = [moment for moment in backward_starts(layout, 4, place) if moment.kind != "weights"][-1]
        fill = next(step_peaks(parts, [0], keeps_gradients=False, start=last, keeps_sent=schedule != "1f1b"))
        assert fill["buffers"] == expected * 128 * MODEL.hidden_size * 2, place


def test_the_estimate_is_that_of_the_fullest_rank() -> None:
    """1F1B keeps most on the first stage, and GPipe on the stage of the logits."""
    config = run(shaped(num_hidden_layers=8), global_batch=8)
    assert estimate_memory(config, layout_of(config, pp=2), ADAM_FP32).loss_bytes == 0
    config = run(shaped(num_hidden_layers=8, vocab_size=4000), global_batch=8)
    layout = layout_of(config, pp=2, schedule="gpipe")
    found = estimate_memory(config, layout, ADAM_FP32)
    assert found.loss_bytes == 3 * 128 * 4000 * 4
    assert found.parameter_bytes == 4 * held_parameter_count(
        config.model, split_into_stages(config.model, layout)[1], 1
    )


@pytest.mark.parametrize("sizes", ({}, {"vocab_size": 4000}, {"intermediate_size": 1024}, {"name": "gpt_tiny"}))
@pytest.mark.parametrize("seq_len", (128, 512))
@pytest.mark.parametrize("place", (1, 2))
@PRECISIONS
@CHECKPOINTINGS
def test_a_backward_in_two_halves_fills_what_is_predicted(
    sizes: dict[str, Any], seq_len: int, place: int, precision: PrecisionConfig, checkpointing: str
) -> None:
    """An inner and the last of three stages run through the functions of torch's zero bubble."""
    config = run(shaped(**sizes, num_hidden_layers=6, context_length=512), precision, checkpointing, seq_len=seq_len)
    layout = layout_of(config, pp=3, schedule="zero_bubble", layers_per_stage=(2, 2, 2))
    stage, dtype = split_into_stages(config.model, layout)[place], getattr(torch, precision.compute)
    module = built(config.model, dtype, checkpointing, stage)
    for parameter in module.parameters() if precision is FP32 else ():
        parameter.grad = torch.zeros_like(parameter)  # accumulated into; in mixed precision the masters' are
    hidden = torch.zeros(1, seq_len, config.model.hidden_size, dtype=dtype).requires_grad_()
    tokens, gradient = torch.zeros(1, seq_len, dtype=torch.int64), torch.zeros_like(hidden).detach()
    with Live() as live:
        outputs = [module(hidden, tokens) if stage.holds_head else module(hidden)]
        back = None if stage.holds_head else [gradient]
        _, groups = stage_backward_input(outputs, back, [hidden], module.parameters())
        with GraphExecGroup():  # as the engine does, so that a layer's second forward serves all its weights
            stage_backward_weight(module.parameters(), groups)
    (part,) = stage_costs(config, layout, "cpu", [stage])
    fills = [*backward_peaks(part, "inputs", 0), *backward_peaks(part, "weights", 0)]
    # The output, the gradient that goes back, and what is sent are the schedule's; so is the buffer of the input.
    predicted = max(sum(fill.values()) for fill in fills) - part.received_input_bytes + part.output_bytes
    # A recomputed block with LayerNorm has a tensor per layer that is not accounted for: up to 7 % of the peak.
    unknown = 0.08 if config.model.family == "gpt" and checkpointing == "full" else 0.05
    assert predicted == pytest.approx(live.peak_bytes, rel=unknown)


def played(config: RunConfig, layout: Layout, place: int) -> tuple[int, int]:
    """Return the most bytes alive in a rank's step beside its inputs, and the most saved for backward.

    The step runs without its neighbors.
    """
    stage, dtype, probe = (
        split_into_stages(config.model, layout)[place],
        getattr(torch, config.precision.compute),
        Probe(),
    )
    module = build_model(config.model, stage)
    apply_checkpointing(module, config.checkpointing, probe)
    materialize(module, config.model, 0, CPU, dtype)
    size, count = (config.train.micro_batch, config.train.seq_len), layout.grad_accumulation_steps(config.train)
    tokens = torch.zeros(size, dtype=torch.int64)
    received = [torch.zeros(*size, config.model.hidden_size, dtype=dtype) for _ in range(2 * count)]
    arriving = [tokens] * count if stage.holds_embedding else [hidden.requires_grad_() for hidden in received[:count]]
    waiting: list[tuple[Tensor, Tensor]] = []
    halves: list[list[dict[str, Any]]] = []
    sent: list[Tensor | None] = []
    with ActivationMeter(module) as meter, probe.listen(Recomputing(meter)), Live() as live:
        for kind, _ in schedule_order(layout, count, place):
            if kind == "forward":
                taken = arriving.pop(0)
                waiting.append((taken, module(taken, tokens) if stage.holds_head else module(taken)))
                sent += [] if stage.holds_head or layout.schedule == "1f1b" else [waiting[-1][1].detach()]
            elif kind == "weights":
                with GraphExecGroup():
                    stage_backward_weight(module.parameters(), halves.pop(0))
            else:
                taken, output = waiting.pop(0)
                outputs, back = [output], None if stage.holds_head else [received[-1 - len(waiting)].detach()]
                del output
                if kind == "inputs":
                    made, groups = stage_backward_input(outputs, back, [taken], module.parameters())
                    halves.append(groups)
                    taken.grad = None
                else:
                    made = stage_backward(outputs, back or [None], [taken])
                sent += [*made] if layout.schedule != "1f1b" else []
                del outputs, made, taken
    return live.peak_bytes, meter.peak_bytes


@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zero_bubble"))
@PLACES
@pytest.mark.parametrize("vocab_size", (256, 4000))
@CHECKPOINTINGS
def test_a_step_of_a_pipelines_rank_fills_what_is_predicted(
    schedule: str, place: int, vocab_size: int, checkpointing: str
) -> None:
    config = run(shaped(num_hidden_layers=6, vocab_size=vocab_size), FP32, checkpointing, global_batch=6)
    layout = layout_of(config, pp=3, schedule=schedule, layers_per_stage=(2, 2, 2))
    live_bytes, _ = played(config, layout, place)
    held = split_into_stages(config.model, layout)[place]
    found = estimate_rank_memory(config, layout, ADAM_FP32, "cpu", place, [held])
    standing = found.parameter_bytes + found.optimizer_bytes + found.communication_buffer_bytes
    assert found.peak_bytes - standing == pytest.approx(live_bytes, rel=0.05)


@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zero_bubble"))
@PLACES
@pytest.mark.parametrize(
    "family", ({}, pytest.param({"name": "gpt_tiny"}, marks=pytest.mark.long), {"name": "gpt_tiny", "dropout": 0.1})
)
@CHECKPOINTINGS
def test_a_pipelines_rank_keeps_what_is_predicted(
    schedule: str, place: int, family: dict[str, Any], checkpointing: str
) -> None:
    config = run(shaped(**family, num_hidden_layers=6, vocab_size=1000), BF16, checkpointing, global_batch=6)
    layout = layout_of(config, pp=3, schedule=schedule, layers_per_stage=(2, 2, 2))
    _, kept_bytes = played(config, layout, place)
    assert activation_bytes(config, layout, "cpu", place) == pytest.approx(kept_bytes, rel=0.02)


def test_loss_parallel_needs_four_parts_of_the_logits() -> None:
    whole_logits = 2 * 64 * 330 * 4
    assert sum(loss_tensors(MicroBatchShape(MODEL, 2, 64, "float32")).values()) == 3 * whole_logits
    assert sum(loss_tensors(MicroBatchShape(MODEL, 2, 64, "float32", tp=2)).values()) == 2 * whole_logits


def test_no_model_is_offered_that_the_pipeline_cannot_take() -> None:
    """The model 1b ties its head to its embedding, and 125m and tiny have fewer layers than 16 stages."""
    config = run(model_named("7b"), global_batch=16)
    layout = layout_of(config, pp=16)

    def offered(available_bytes: float) -> str:
        need = {"available_bytes": int(available_bytes), "ranks_on_host": 1, "device": "cuda", "models": PREPARED}
        reason = capacity_problem(config, layout, ADAM_FP32, **need)  # type: ignore[arg-type]
        assert reason is not None
        return reason.partition("choose")[2]

    assert "model=350m" in offered(9e9) and "model=1b" not in offered(9e9)
    assert "model=" not in offered(1e9)
