"""Lower bounds of a candidate's memory that take much less time than its exact estimate. Imports no torch.

Each is what one rank of the pipeline has at one moment of a step, so that the highest rank's peak is never below it.
"""

from collections.abc import Iterator

from harness.cost_model.activations import loss_bytes
from harness.cost_model.memory import WORKSPACE_BYTES
from harness.cost_model.pipeline import max_in_flight_micro_batches
from harness.cost_model.prediction import Prediction
from harness.cost_model.rank_memory import RankStep, alike_ranks, sharding_of
from harness.cost_model.stack_memory import ranks, workspace_bytes
from harness.cost_model.stack_moments import model_state
from harness.cost_model.stack_parameters import rank_parts


def state_lower_bound(prediction: Prediction) -> int:
    """Return bytes of the optimizer's step, which depend on layout and micro-batch alone, whatever the checkpointing.

    They are model state, and buffers that live as long.
    """
    if not prediction.is_runnable:
        return stack_lower_bound(prediction)
    if prediction.is_of_nearest_decoder:
        return 0
    highest = max(step.lasting_bytes + step.outside.total for step, _ in end_ranks(prediction))
    return highest + WORKSPACE_BYTES * (prediction.cluster.device == "cuda")


def memory_lower_bound(prediction: Prediction) -> int:
    """Return bytes when a backward starts.

    A rank keeps the activations of all passes in flight, or those of the last stage and the loss.
    """
    if not prediction.is_runnable or prediction.is_of_nearest_decoder:
        return 0
    layout, highest = prediction.layout, 0
    for step, pp_ranks in end_ranks(prediction):
        own, passes = step.sharding, 1
        if layout.pp_enabled:
            rank = 0 if layout.schedule == "gpipe" else pp_ranks[0]
            passes = max_in_flight_micro_batches(layout, own.micro_batches, rank) - layout.splits_backward
        sizes = [stage.before_backward - stage.received_input_bytes for stage in own.activations]
        at_loss = sizes[-1] + loss_bytes(own.shape) if own.stages[-1].holds_head else 0
        highest = max(highest, step.lasting_bytes + max(passes * min(sizes), at_loss))
    return highest + WORKSPACE_BYTES * (prediction.cluster.device == "cuda")


LOWER_BOUNDS = (state_lower_bound, memory_lower_bound)  # the quickest first


def end_ranks(prediction: Prediction) -> Iterator[tuple[RankStep, tuple[int, ...]]]:
    """Yield the steps of the first and of the last kind of the pipeline's ranks."""
    config, layout, device = prediction.config, prediction.layout, prediction.cluster.device
    alike = alike_ranks(config.model, layout, config.checkpointing.every)
    for stages, pp_ranks in dict.fromkeys((alike[0], alike[-1])):
        yield RankStep(sharding_of(config, layout, prediction.widths, device, stages)), pp_ranks


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
