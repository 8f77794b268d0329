"""The memory of one rank of a pipeline, which plans need of the highest rank alone."""

from collections.abc import Sequence

from harness.config.schema import Device, RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.memory import MemoryEstimate, rank_estimate
from harness.cost_model.rank_memory import RankStep, sharding_of
from harness.cost_model.stack_memory import HOPPER, RankMemory, stack_rank_memory, stack_steps
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


def estimate_rank_memory(
    config: RunConfig, layout: Layout, widths: StateWidths, device: Device, pp_rank: int, stages: Sequence[Stage]
) -> MemoryEstimate:
    """Return the memory of this rank of the pipeline, which has these stages, under the stack harness."""
    step = RankStep(sharding_of(config, layout, widths, device, stages))
    return rank_estimate(step, pp_rank)


def predict_rank_memory(
    config: RunConfig, layout: Layout, stack: StackConfig, pp_rank: int, compute_capability: int = HOPPER
) -> RankMemory:
    """Return the memory of this rank of the pipeline under another stack."""
    step = next(step for step in stack_steps(config, layout, stack.memory) if pp_rank in step.pp_ranks)
    return stack_rank_memory(step, pp_rank, stack.memory, compute_capability)
