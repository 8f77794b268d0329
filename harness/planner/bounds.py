"""Lower bounds of a candidate's memory that take much less time than its exact estimate. Imports no torch.

Each is a part of what the exact model adds up for one rank of the pipeline at one moment of a step, so that the highest
rank's peak is never below it.
"""

from collections.abc import Sequence
from functools import lru_cache

from harness.config.checkpointing import CheckpointingConfig
from harness.cost_model.activations import loss_bytes
from harness.cost_model.buffers import WORKSPACE_BYTES
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape, micro_batch_shape
from harness.cost_model.pipeline import max_in_flight_micro_batches
from harness.cost_model.prediction import Prediction
from harness.cost_model.rank_memory import alike_ranks, optimizer_parameter_count
from harness.cost_model.stack_memory import ranks, workspace_bytes
from harness.cost_model.stack_moments import model_state
from harness.cost_model.stack_parameters import rank_parts
from harness.cost_model.stage_activations import offloaded_bytes, stage_activations
from harness.cost_model.stage_memory import local_parameter_count
from harness.layout.partition import Stage


def state_lower_bound(prediction: Prediction) -> int:
    """Return bytes of model state, and of buffers that live as long, that the highest rank has at least.

    They depend on layout and micro-batch alone, whatever the checkpointing.
    """
    if not prediction.is_runnable:
        return stack_lower_bound(prediction)
    if prediction.is_of_nearest_decoder:
        return 0
    return max(sum(rank_state(prediction, stages)) for stages, _ in end_ranks(prediction))


def memory_lower_bound(prediction: Prediction) -> int:
    """Return bytes that the highest rank has at least when a backward starts, at its ends of the pipeline.

    A rank keeps the activations of all passes in flight, or those of the last stage and the loss.
    """
    if not prediction.is_runnable or prediction.is_of_nearest_decoder:
        return 0
    config, layout = prediction.config, prediction.layout
    shape = micro_batch_shape(config, layout, prediction.cluster.device)
    micro_batches = layout.grad_accumulation_steps(config.train)
    highest = 0
    for stages, pp_ranks in end_ranks(prediction):
        passes = 1
        if layout.pp_enabled:
            rank = 0 if layout.schedule == "gpipe" else pp_ranks[0]
            passes = max_in_flight_micro_batches(layout, micro_batches, rank) - layout.splits_backward
        sizes = [pass_bytes(shape, stage, config.checkpointing) for stage in stages]
        at_loss = sizes[-1] + loss_bytes(shape) if stages[-1].holds_head else 0
        state, _ = rank_state(prediction, stages)
        highest = max(highest, state + max(passes * min(sizes), at_loss))
    return highest


LOWER_BOUNDS = (state_lower_bound, memory_lower_bound)  # the quickest first


def end_ranks(prediction: Prediction) -> Sequence[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    """Return the stages of the first and of the last kind of the pipeline's ranks."""
    alike = alike_ranks(prediction.config.model, prediction.layout, prediction.config.checkpointing.every)
    return alike if len(alike) == 1 else (alike[0], alike[-1])


def stack_lower_bound(prediction: Prediction) -> int:
    """Return the bytes of the first and of the last rank in the optimizer's step under another stack."""
    config, layout, memory = prediction.config, prediction.layout, prediction.stack.memory
    highest = 0
    for rank in {ranks(layout)[0], ranks(layout)[-1]}:
        state = model_state(config, layout, memory, rank_parts(config.model, layout, memory, rank))
        size = state.parameters + state.optimizer + sum(state.in_optimizer_step().values())
        highest = max(highest, size)
    # The least workspaces of any device.
    return highest + min(workspace_bytes(memory, 0), workspace_bytes(memory, 99))


def rank_state(prediction: Prediction, stages: tuple[Stage, ...]) -> tuple[int, int]:
    """Return the bytes of state and lasting buffers of a rank with these stages, and those of its gradients.

    Gradients are there in the optimizer's step. torch's pipelines receive every micro-batch into a buffer of its own.
    """
    config, layout, widths = prediction.config, prediction.layout, prediction.widths
    on_gpu = prediction.cluster.device == "cuda"
    counts = [local_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp) for stage in stages]
    away = layout.offloaded_state if on_gpu else ()
    state = WORKSPACE_BYTES if on_gpu else 0
    if "parameters" not in away:
        state += -(-widths.parameters * sum(counts) // layout.shard_count("parameters"))
    if "optimizer" not in away:
        state += widths.optimizer * optimizer_parameter_count(config.model, layout, stages)
    ends = sum((not stage.holds_embedding) + (not stage.holds_head) for stage in stages)
    if ends:
        hidden = micro_batch_shape(config, layout, prediction.cluster.device).hidden_bytes
        state += layout.grad_accumulation_steps(config.train) * ends * hidden
    if layout.uses_deepspeed_zero and layout.zero_stage == 2:  # whose partitions are uneven
        return state, 0
    return state, sum(-(-widths.gradients * count // layout.shard_count("gradients")) for count in counts)


@lru_cache(maxsize=16384)
def pass_bytes(shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> int:
    """Return the bytes that a pass through a stage keeps on the device, beside the buffer that received its input."""
    size = stage_activations(shape, stage, checkpointing).before_backward
    if checkpointing.offload_activations and shape.device != "cpu":
        moved = offloaded_bytes(shape, stage, checkpointing)
        size -= moved - moved // stage.layers
    keeps_input = shape.width == FP32_BYTES or not shape.norm_is_decomposed
    if not stage.holds_embedding and (keeps_input or checkpointing.recomputes_layer(stage.first_layer)):
        size -= shape.hidden_bytes
    return size
