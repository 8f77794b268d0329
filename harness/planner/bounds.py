"""Lower bounds of a candidate's memory that take much less time than its exact estimate. Imports no torch.

Each is what one rank of the pipeline has at one moment of a step, so that the highest rank's peak is never below it.
"""

from harness.cost_model.memory import WORKSPACE_BYTES
from harness.cost_model.pipeline import max_in_flight_micro_batches
from harness.cost_model.prediction import Prediction
from harness.cost_model.rank_memory import RankStep, rank_steps
from harness.cost_model.stack_memory import stack_steps, workspace_bytes


def state_lower_bound(prediction: Prediction) -> int:
    """Return bytes of the optimizer's step, which depend on layout and micro-batch alone, whatever the checkpointing.

    They are model state, and buffers that live as long.
    """
    steps = end_steps(prediction)
    return workspaces(prediction) + max((step.lasting_bytes + step.outside.total for step in steps), default=0)


def memory_lower_bound(prediction: Prediction) -> int:
    """Return bytes when a backward starts.

    A rank keeps the activations of all passes in flight, or those of the last stage and the loss.
    """
    highest = 0
    for step in end_steps(prediction):
        own = step.sharding
        in_flight = max_in_flight_micro_batches(own.layout, own.micro_batches, step.pp_ranks[0])
        passes = in_flight - own.layout.splits_backward
        sizes = [stage.before_backward - stage.received_input_bytes for stage in own.activations]
        at_loss = (sizes[-1] + own.activations[-1].loss_bytes) * own.stages[-1].holds_head
        highest = max(highest, step.lasting_bytes + max(passes * min(sizes), at_loss))
    return highest + workspaces(prediction)


LOWER_BOUNDS = (state_lower_bound, memory_lower_bound)  # the quickest first


def end_steps(prediction: Prediction) -> list[RankStep]:
    """Return the steps of the first and of the last kind of the pipeline's ranks; none for a traced model."""
    config, layout = prediction.config, prediction.layout
    if prediction.is_of_nearest_decoder:
        return []
    if prediction.is_runnable:
        steps = rank_steps(config, layout, prediction.widths, prediction.cluster.device)
    else:
        steps = stack_steps(config, layout, prediction.stack.memory)
    return steps[:: max(1, len(steps) - 1)]


def workspaces(prediction: Prediction) -> int:
    """Return the workspaces of matrix products."""
    if prediction.is_of_nearest_decoder or prediction.cluster.device == "cpu":
        return 0
    of_stack = workspace_bytes(prediction.stack.memory, prediction.cluster.hardware.compute_capability)
    return WORKSPACE_BYTES if prediction.is_runnable else of_stack
