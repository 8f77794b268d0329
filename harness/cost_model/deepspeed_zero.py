"""The memory that DeepSpeed's stages 1 and 2 take beside model state. Imports no torch.

Functions that are named without a file are those of deepspeed/runtime/zero/stage_1_and_2.py.
"""

import bisect
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.cost_model.shard_groups import without_data_parallelism
from harness.cost_model.sharding import Sharding
from harness.cost_model.tape import Tape
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_sizes
from harness.layout.state_widths import StateWidths

FP64_BYTES = 8


class DeepSpeedZero(Sharding):
    """What DeepSpeed's stages have in common: no pipeline, and a partition of each kind of state that they divide."""

    has_host_part = True

    @cached_property
    def sizes(self) -> list[int]:
        """The elements of each parameter, in order."""
        return list(map(math.ceil, self.even_sizes))

    @cached_property
    def partition(self) -> int:
        """The elements of a rank's partition."""
        return math.ceil(sum(self.even_sizes) / self.degree)

    @property
    def keeps_gradients(self) -> bool:
        """Whether the memory of gradients is still allocated when a step begins: not before the host's part is."""
        return self.offloads and self.is_cpu and self.layout.dp_enabled

    @property
    def copied_bytes(self) -> int:
        """The bytes of the rank's part of the gradients in a flat copy that the optimizer takes."""
        width = self.precision.accumulate_bytes
        return -(-width * sum(self.counts) // self.degree) * (self.widths.gradients == width)

    def gathered_copy(self) -> int:
        """Return the bytes of the flat copy in which gloo gathers new parameters."""
        return self.precision.compute_bytes * sum(self.counts) * (self.degree > 1)


class ZeroStage1(DeepSpeedZero):
    """Stage 1, and BF16_Optimizer, which holds gradients as backward computes them beside their fp32 sums."""

    @property
    def holds_gradients_twice(self) -> bool:
        """Whether BF16_Optimizer runs."""
        return self.widths.gradients > self.precision.accumulate_bytes

    @property
    def has_16_bit_grads(self) -> bool:
        """Whether gradients of 16 bit are added to sums at once: BF16_Optimizer does so at the end of a backward."""
        return self.is_mixed and not self.holds_gradients_twice

    @cached_property
    def gradients_at_start(self) -> list[int]:
        """The bytes of gradients when a step begins; BF16_Optimizer has its fp32 sums (engine.py, _take_model_step)."""
        if not self.holds_gradients_twice or (self.offloads and not self.is_cpu):
            return super().gradients_at_start
        return [size * self.precision.accumulate_bytes // self.widths.gradients for size in self.sums]

    def step(self, tape: Tape) -> None:
        """Reduce gradients under offload, compute their norm, copy the partition, and gather the new parameters.

        Without BF16_Optimizer the reduction buckets are freed before parameters are gathered.
        """
        super().step(tape)
        own, width, first = sum(self.gradients), self.precision.accumulate_bytes, self.sizes[0]
        freed, largest_copy = self.widths.buffer_bytes, FP64_BYTES * min(first, self.partition)
        if self.holds_gradients_twice:  # it widens a copy of one after the other (bf16_optimizer.py, _update_hp_grad)
            tape.touch(gradients=own, temporaries=width * max(self.sizes))
        else:
            tape.touch(gradients=own, temporaries=self.copied_bytes, buffers_bucket=-freed)
        if self.is_cpu:
            freed *= not (self.holds_gradients_twice or self.offloads)
            tape.touch(gradients=own * self.holds_gradients_twice, buffers_gathered=self.gathered_copy() - freed)
        elif self.offloads:
            # When the first gradient, the embedding's, is reduced by itself, there are the rank's partition of the sums
            # in mixed precision (_get_compact_grad_partition_slice), and a copy in fp64 for the norm of what the rank
            # has of it (copy_grads_in_partition, set_norm_for_param_grad_in_gpu).
            copied = largest_copy * (first > self.widths.reduce_bucket_elements)
            tape.touch(gradients=own, temporaries=copied + width * self.partition * self.is_mixed)
        elif not self.holds_gradients_twice:
            # The norm takes a copy in fp64 of each gradient. The first rank has the most: only parts of its own
            # gradients, from the embedding on, and all of others' (get_grad_norm_direct and free_grad_in_param_list).
            ends = accumulate(self.sizes)
            whole = sum(size for size, end in zip(self.sizes, ends, strict=True) if end - size < self.partition)
            elements = sum(self.sizes) + (self.partition - whole) * self.is_mixed
            tape.touch(gradients=width * elements, temporaries=largest_copy)


def partition_elements(
    model: ModelConfig, layout: Layout, stages: Sequence[Stage], smallest: int | None = None
) -> float:
    """Return the elements of the parameters that lie in a rank's partition of the flat parameters, at least in part.

    It is those of the rank with most of them: DeepSpeed's stage 2 keeps each of their gradients whole. Only those with
    more elements than `smallest` count if it is given, and not the embedding.
    """
    return _fullest_partition(model, without_data_parallelism(layout), tuple(stages), layout.dp_shard, smallest)[0]


def fullest_rank(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> int:
    """Return a rank that no other one exceeds where DeepSpeed divides all parameters as one tensor: stages 1 and 2.

    Stage 2 keeps gradients whole, and allocates the partition of the last ranks first. Stage 1 under offload reduces
    all gradients after backward, of which the first rank has the first.
    """
    if layout.zero_stage == 1:
        return 0
    if layout.offload != "none":
        return layout.world_size - layout.tp
    smallest = widths.reduce_bucket_elements if config.precision.is_mixed else None
    shared = without_data_parallelism(layout)
    return _fullest_partition(config.model, shared, tuple(stages), layout.dp_shard, smallest)[1] * layout.tp


@lru_cache(maxsize=256)
def _fullest_partition(
    model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int, smallest: int | None
) -> tuple[float, int]:
    """Return the elements of partition_elements, and the last shard that has as many."""
    sizes = local_sizes(model, layout, stages)
    part, ends = sum(sizes) / shards, list(accumulate(sizes))
    begins = [end - size for size, end in zip(sizes, ends, strict=True)]
    # A rank within one parameter has no more than the ranks in which that parameter begins and ends.
    borders = {int(end / part) + offset for end in (0.0, *ends) for offset in (-1, 0, 1)}
    ranks = sorted(rank for rank in borders if 0 <= rank < shards)
    counted = sizes if smallest is None else [0.0, *(size if size > smallest else 0.0 for size in sizes[1:])]
    return max(
        (sum(counted[bisect.bisect_right(ends, rank * part) : bisect.bisect_left(begins, (rank + 1) * part)]), rank)
        for rank in ranks
    )
