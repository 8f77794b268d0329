"""The memory prediction along the tensor and pipeline axes, compared with DTensor and torch's halves of a backward."""

import dataclasses
import itertools
import math
import re
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

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, PrecisionConfig, RunConfig
from harness.cost_model.activations import block_tensors
from harness.cost_model.memory import estimate_memory, saved_bytes
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.pipeline import backward_starts, schedule_order
from harness.cost_model.rank_memory import RankStep, sharding_of
from harness.cost_model.shard_groups import local_parameter_count
from harness.cost_model.stage_activations import stage_activations
from harness.engines.torch.tensor_parallel import apply_tensor_parallel
from harness.layout.layout import Layout, resolve_layout
from harness.layout.partition import parameters_of_stage, split_into_stages, tp_shard_dim, whole_model
from harness.layout.state_widths import StateWidths
from harness.measure.activations import ActivationMeter
from harness.models.activation_checkpoint import apply_checkpointing
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import materialize
from harness.probe import Probe
from tests.support.capacity import capacity_problem
from tests.support.commands import compose_layout, widths_of
from tests.support.models import ADAM_FP32, BF16, FP32, PREPARED, Hearing, Live, model_named, run, shaped
from tests.support.pairwise import pairwise
from tests.support.rank_memory import estimate_rank_memory
from tests.support.schedules import laid_out
from tests.support.schedules import order as order_of_torch

MODEL = shaped(num_key_value_heads=4, vocab_size=330)  # four ranks cannot cut this vocabulary evenly

GPT = shaped("gpt_tiny", vocab_size=330)

FAMILIES = {"llama": MODEL, "gpt": dataclasses.replace(GPT, dropout=0.1)}

CPU = torch.device("cpu")

PRECISIONS = {precision.name: precision for precision in (FP32, BF16)}

CHECKPOINTINGS = {"none": "none", "full": "full"}

WHOLLY_BF16 = PrecisionConfig("bf16", *["bfloat16"] * 4)

SCHEDULES = {name: name for name in ("gpipe", "1f1b", "zero_bubble")}

STAGES = {"first": 0, "inner": 1, "last": 2}  # of three


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


def test_tensor_parallelism_halves_the_tensors_between_matrices() -> None:
    """With sequence parallelism it halves those of the norms, too, but not their outputs, which are gathered."""
    whole, cut, cut_sequences = (
        block_tensors(MicroBatchShape(MODEL, 2, 64, "float32", tp=tp, sequence_parallel=sequence_parallel))
        for tp, sequence_parallel in ((1, False), (2, False), (2, True))
    )
    norms = {name for name in whole if "layernorm" in name}
    assert {name: size / cut[name] for name, size in whole.items()} == {name: 2 - (name in norms) for name in whole}
    gathered = {name for name in norms if name.endswith(".output")}
    ratios = {name: size / cut_sequences[name] for name, size in whole.items()}
    assert ratios == {name: 2 - (name in gathered) for name in whole}


@pairwise(
    tp={"tp2": 2, "tp4": 4},
    sequence_parallel={"tp": False, "tp_sp": True},
    attention={"flash": "flash", "eager": "eager"},
    family=FAMILIES,
    precision=PRECISIONS,
    checkpointing=CHECKPOINTINGS,
)
def test_a_tensor_parallel_rank_saves_the_predicted_bytes(
    tp: int,
    sequence_parallel: bool,
    attention: str,
    family: ModelConfig,
    precision: PrecisionConfig,
    checkpointing: str,
) -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    model = dataclasses.replace(family, attention=attention)
    with cut_model(tp, sequence_parallel, precision, checkpointing, model) as module:
        with ActivationMeter(module).measure() as meter:
            loss = loss_function(module(tokens), tokens)
        measured = meter.saved_bytes
        del loss
    shape = MicroBatchShape(model, 2, 64, precision.compute, tp=tp, sequence_parallel=sequence_parallel)
    targets_bytes = 8 * tokens.numel()
    saved_by_stages = stage_activations(shape, whole_model(model), CheckpointingConfig(checkpointing)).before_backward
    predicted = saved_by_stages + shape.logits_bytes + targets_bytes
    assert predicted == pytest.approx(measured, rel=0.01)


@pairwise(
    sizes={"loss": {"vocab_size": 8000}, "mlp": {"intermediate_size": 1024}, "one_layer": {"num_hidden_layers": 1}},
    tensor={"tp2": (2, False), "tp4": (4, False), "tp_sp4": (4, True)},
    family=FAMILIES,
    precision=PRECISIONS,
    checkpointing=CHECKPOINTINGS,
)
def test_predicted_peak_of_a_tensor_parallel_rank_equals_the_measured_peak(
    sizes: dict[str, int],
    tensor: tuple[int, bool],
    family: ModelConfig,
    precision: PrecisionConfig,
    checkpointing: str,
) -> None:
    tp, sequence_parallel = tensor
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    model = dataclasses.replace(family, **sizes)  # type: ignore[arg-type]
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
def test_a_ranks_parameters_follow_from_plan_and_stage(model: ModelConfig, tp: int, pp: int) -> None:
    """The fullest rank has a tp-th of each matrix, rounded up; norms and biases after a sum are whole."""
    config = run(model)
    for stage in split_into_stages(model, layout_of(config, pp=pp)) if pp > 1 else [whole_model(model)]:
        expected = 0
        for parameter in parameters_of_stage(model, stage):
            cut = tp_shard_dim(parameter.name, model)
            expected += math.prod(
                -(-size // tp) if index == cut else size for index, size in enumerate(parameter.shape)
            )
        assert local_parameter_count(model, stage, tp, tp) == expected


# --- pipelines: passes kept, in torch's order


PASSES = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}

ONE_STAGE_A_RANK, SEVERAL = ("gpipe", "1f1b"), ("interleaved_1f1b", "zero_bubble")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    schedule=st.sampled_from([(name, 1) for name in ONE_STAGE_A_RANK] + [(name, v) for name in SEVERAL for v in (2, 3)])
    | st.just(("zero_bubble", 1)),
    p=st.integers(2, 8),
    rounds=st.integers(1, 4),
)
def test_passes_run_in_the_order_of_torchs_schedules(schedule: tuple[str, int], p: int, rounds: int) -> None:
    """The first stage's input needs no gradient, so torch runs its whole backward in place of the weights' half."""
    layout = laid_out(schedule[0], p, schedule[1])
    for pp_rank, expected in order_of_torch(layout, p * rounds).items():
        passes = [
            ("backward" if (stage, kind) == (0, "W") else PASSES[kind], stage // p)
            for stage, kind, _ in expected
            if (stage, kind) != (0, "I")
        ]
        assert list(schedule_order(layout.schedule, p, layout.virtual_stages, p * rounds, pp_rank)) == passes


def test_interleaving_saves_more_passes_of_earlier_stages() -> None:
    """Four micro-batches go through stages 0 and 2 of rank 0 of 2: F0 F0 F2 F2 F0, and then a backward of stage 2.

    Stage 2 then has two passes, stage 0 three, and a fourth before stage 2's next backward.
    """
    config = run(shaped(num_hidden_layers=8), global_batch=4)
    layout = layout_of(config, pp=2, schedule="interleaved_1f1b", virtual_stages=2)
    shape = MicroBatchShape(config.model, 1, 128, "float32")
    first, _, third, _ = (
        stage_activations(shape, stage, CheckpointingConfig("none")).before_backward
        for stage in split_into_stages(config.model, layout)
    )
    assert saved_bytes(config, layout, "cpu", 0)[0] == max(3 * first + 2 * third, 4 * first + third)


@pytest.mark.parametrize(("schedule", "virtual"), (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)))
def test_every_micro_batch_has_its_own_receive_buffers(schedule: str, virtual: int) -> None:
    config = run(shaped(num_hidden_layers=8), BF16, global_batch=6)
    layout = layout_of(config, pp=2, schedule=schedule, virtual_stages=virtual)
    memory = estimate_memory(config, layout, ADAM_FP32)
    ends = 2 * virtual - 1  # each of a rank's stages receives from both sides, less one end of the model
    assert memory.communication_buffer_bytes == ends * 6 * 128 * config.model.hidden_size * 2


@pytest.mark.parametrize(("schedule", "sent", "back"), (("gpipe", 4, 3), ("1f1b", 1, 1), ("zero_bubble", 4, 3)))
def test_sent_tensors_accumulate_in_all_schedules_but_1f1b(schedule: str, sent: int, back: int) -> None:
    """Before the last of four backwards of two stages, all outputs and three gradients have been sent."""
    config = run(MODEL, BF16, global_batch=4)  # on a CPU it keeps fp32 copies of inputs, not what it received
    layout = layout_of(config, pp=2, schedule=schedule)
    for pp_rank, (stage, expected) in enumerate(zip(split_into_stages(MODEL, layout), (sent, back), strict=True)):
        step = RankStep(sharding_of(config, layout, ADAM_FP32, "cpu", [stage]))
        last = [moment for moment in backward_starts(layout, 4, pp_rank) if moment.kind != "weights"][-1]
        assert step.kept_of_others(last)["buffers"] == expected * 128 * MODEL.hidden_size * 2, pp_rank


def measured_step(config: RunConfig, layout: Layout, pp_rank: int) -> tuple[int, int]:
    """Return the most bytes alive in a rank's step beside its inputs, and the most saved for backward.

    The step runs without its neighbors. In torch's Schedule1F1B a rank refers to the gradient that it sent last, and to
    the last send of its warm-up, that of the last forward but one, until its cool-down.
    """
    stage, probe = split_into_stages(config.model, layout)[pp_rank], Probe()
    dtype = getattr(torch, config.precision.compute)
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
    warm_up, of_warm_up, done = layout.pp - pp_rank, [], 0
    with ActivationMeter(module).measure() as meter, probe.listen(Hearing(meter)), Live() as live:
        for kind, _ in schedule_order(layout.schedule, layout.pp, layout.virtual_stages, count, pp_rank):
            if kind == "forward":
                stage_input = arriving.pop(0)
                waiting.append((stage_input, module(stage_input, tokens) if stage.holds_head else module(stage_input)))
                sent += [] if stage.holds_head or layout.schedule == "1f1b" else [waiting[-1][1].detach()]
                if layout.schedule == "1f1b" and len(arriving) == count - warm_up + 1:
                    of_warm_up = [waiting[-1][1].detach()]
            elif kind == "weights":
                with GraphExecGroup():
                    stage_backward_weight(module.parameters(), halves.pop(0))
            else:
                of_warm_up = of_warm_up if done <= count - warm_up else []
                done += 1
                stage_input, output = waiting.pop(0)
                outputs, back = [output], None if stage.holds_head else [received[-1 - len(waiting)].detach()]
                del output
                if kind == "inputs":
                    input_grads, groups = stage_backward_input(outputs, back, [stage_input], module.parameters())
                    halves.append(groups)
                    stage_input.grad = None
                else:
                    input_grads = stage_backward(outputs, back or [None], [stage_input])
                sent = [*input_grads] if layout.schedule == "1f1b" else [*sent, *input_grads]
                del outputs, input_grads, stage_input
    return live.peak_bytes, meter.peak_bytes


@pairwise(
    passes={"-".join(kinds): kinds for kinds in itertools.product(SCHEDULES, CHECKPOINTINGS)},
    pp_rank=STAGES,
    sizes={
        "tiny": {},
        "loss": {"vocab_size": 4000},
        "mlp": {"intermediate_size": 1024},
        "gpt": {"name": "gpt_tiny"},
    },
    seq_len={"128": 128, "512": 512},
    precision={precision.name: precision for precision in (FP32, WHOLLY_BF16)},  # gradients are of the module's width
)
def test_predicted_peak_of_a_pipeline_rank_equals_the_measured_peak(
    passes: tuple[str, str], pp_rank: int, sizes: dict[str, Any], seq_len: int, precision: PrecisionConfig
) -> None:
    """A second forward of a backward in halves is highest on some stages alone: every rank runs each schedule so."""
    schedule, checkpointing = passes
    model = shaped(**sizes, num_hidden_layers=6, context_length=512)
    config = run(model, precision, checkpointing, global_batch=6, seq_len=seq_len)
    layout = layout_of(config, pp=3, schedule=schedule, layers_per_stage=(2, 2, 2))
    live_bytes, _ = measured_step(config, layout, pp_rank)
    stage = split_into_stages(config.model, layout)[pp_rank]
    widths = ADAM_FP32 if precision is FP32 else StateWidths(parameters=2, frozen=2, gradients=2, masters=0, gathered=2)
    memory = estimate_rank_memory(config, layout, widths, "cpu", pp_rank, [stage])
    constant_bytes = memory.parameter_bytes + memory.optimizer_bytes + memory.communication_buffer_bytes
    assert memory.peak_bytes - constant_bytes == pytest.approx(live_bytes, rel=0.05)


@pairwise(
    schedule=SCHEDULES,
    pp_rank=STAGES,
    family={"llama": {}, "gpt": {"name": "gpt_tiny"}, "dropout": {"name": "gpt_tiny", "dropout": 0.1}},
    checkpointing=CHECKPOINTINGS,
)
def test_a_pipeline_rank_saves_the_predicted_bytes(
    schedule: str, pp_rank: int, family: dict[str, Any], checkpointing: str
) -> None:
    config = run(shaped(**family, num_hidden_layers=6, vocab_size=1000), BF16, checkpointing, global_batch=6)
    layout = layout_of(config, pp=3, schedule=schedule, layers_per_stage=(2, 2, 2))
    _, measured = measured_step(config, layout, pp_rank)
    assert saved_bytes(config, layout, "cpu", pp_rank)[0] == pytest.approx(measured, rel=0.02)


def test_no_model_is_offered_that_cannot_be_cut_into_the_stages() -> None:
    """The models 125m and tiny have fewer layers than 16 stages."""
    config = run(model_named("7b"), global_batch=16)
    reasons = [
        capacity_problem(
            *(config, layout_of(config, pp=16), ADAM_FP32),
            available_bytes=available,
            ranks_on_host=1,
            device="cuda",
            models=PREPARED,
        )
        for available in (9 * 10**9, 10**9)
    ]
    offered = [re.findall("model=([^ ]+)", str(reason).partition("choose")[2]) for reason in reasons]
    assert offered == [["1b"], []]


@pytest.mark.parametrize("strategy", ["fsdp_pp strategy.pp=4", "fsdp_pp strategy.pp=4 strategy.ep=2 model=moe_tiny"])
def test_a_stage_without_an_embedding_frees_what_it_has_gathered_in_advance(strategy: str) -> None:
    """Nothing comes before its first layer, whose gradients lie beside no flat tensor of another group."""
    sizes = ("model.num_hidden_layers=4", "strategy.zero_stage=3", "train.global_batch=16", "train.micro_batch=1")
    config, layout = compose_layout(16, *f"strategy={strategy}".split(), *sizes)
    stages = split_into_stages(config.model, layout)[1:2]
    step = RankStep(sharding_of(config, layout, widths_of(config, layout), "cuda", stages))
    tape, _ = step.play(step.starts(1)[0])
    (last,) = [live for _, phase, live in tape.moments if phase == "backward" and live.get("buffers_gradients")][-1:]
    assert last.get("buffers_flat", 0) == 0
