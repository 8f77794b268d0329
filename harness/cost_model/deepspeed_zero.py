"""The memory that DeepSpeed's stages 1 and 2 take beside model state. Imports no torch.

Functions that are named without a file are those of deepspeed/runtime/zero/stage_1_and_2.py.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from harness.config.model import ModelConfig
from harness.cost_model.shard_groups import without_data_parallelism
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.tape import Tape
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_sizes

FP64_BYTES = 8


@dataclass(frozen=True)
class RankPartition:
    """A rank's partition of the flat trained parameters, with the parameters that lie in it, at least in part."""

    rank: int
    first: int  # the number of the first one
    sizes: Sequence[int]  # in elements
    largest: int  # the most elements of a parameter that lie in it

    @property
    def owned(self) -> int:
        """The elements of these parameters."""
        return sum(self.sizes)


class DeepSpeedZero(Sharding):
    """What DeepSpeed's stages have in common: no pipeline, and a partition of each kind of state that they divide.

    Its optimizers know trained parameters alone.
    """

    has_host_part = True

    @cached_property
    def sizes(self) -> list[int]:
        """The elements of each parameter, in order."""
        return list(map(math.ceil, self.even_sizes))

    @cached_property
    def partition(self) -> int:
        """The elements of a rank's partition."""
        return math.ceil(sum(self.even_sizes) / self.degree)

    @cached_property
    def ranks(self) -> Sequence[RankPartition]:
        """The ranks among which those with the most of anything are."""
        return rank_partitions(self.config.model, self.layout, self.stages)

    def is_large(self, elements: int) -> bool:
        """Return whether a gradient does not fit the bucket."""
        return elements > self.widths.reduce_bucket_elements

    def large_elements(self, sizes: Sequence[int]) -> int:
        """Return the elements of those gradients that do not fit the bucket."""
        return sum(filter(self.is_large, sizes))

    def head_gradient(self, each: Pass) -> None:
        """Allocate the bucket with the first gradient (setup_buckets)."""
        super().head_gradient(each)
        each.live["buffers_bucket"] = self.widths.backward_buffer_bytes

    @property
    def keeps_gradients(self) -> bool:
        """Whether the memory of gradients is still allocated when a step begins: not before the host's part is."""
        return self.offloads and self.is_cpu and self.layout.dp_enabled

    @property
    def copied_bytes(self) -> int:
        """The bytes of the rank's part of the gradients in a flat copy that the optimizer takes."""
        width = self.precision.accumulate_bytes
        return -(-width * sum(self.counts_of("gradients")) // self.degree) * (self.widths.gradients == width)

    def gathered_copy(self) -> int:
        """Return the bytes of the flat copy in which gloo gathers new parameters."""
        return self.precision.compute_bytes * sum(self.counts_of("gradients")) * (self.degree > 1)

    def flat_step(self, tape: Tape, has_others: bool = False) -> None:
        """Compute the norm of each gradient in fp64, copy a partition that is not flat, and run the optimizer on it.

        All other gradients, if a rank has them, are freed before the copy, and those that lie in the bucket keep it
        (get_grad_norm_direct, free_grad_in_param_list and step).
        """
        flat, width = self.partition, self.precision.accumulate_bytes
        for rank in self.ranks:
            own, others = flat if self.is_mixed else rank.owned, (sum(self.sizes) - rank.owned) * has_others
            large = others and self.large_elements(self.sizes) - self.large_elements(rank.sizes)
            norm, bucket = FP64_BYTES * rank.largest, self.widths.backward_buffer_bytes * (large < others)
            tape.touch(gradients=width * (own + large), temporaries=norm, buffers_bucket=bucket)
            if not self.is_mixed:
                tape.touch(gradients=width * own, temporaries=width * flat)
        tape.touch(gradients=width * flat, temporaries=self.update_bytes)


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

    def begin(self, each: Pass) -> None:
        """Keep the bucket from the first micro-batch's backward to the reduction after the last one's."""
        each.live["buffers_bucket"] = self.widths.backward_buffer_bytes * (not each.is_first)

    def waiting(self, rank: RankPartition) -> int:
        """Return the elements of gradients beside the bucket when a rank copies the first of its own.

        Those that fit have moved to the bucket (reduce_gradients); the copy is made when the next one does not fit. In
        mixed precision the gradients of a bucket are put together before (average_tensor, allreduce_no_retain).
        """
        content, left = 0, sum(self.sizes)
        for number, size in enumerate(self.sizes):
            if content and self.is_large(content + size):
                if number > rank.first:
                    break
                content = 0
            content += size
            left -= size * (not self.is_large(size))
        return left + content * (self.is_mixed and not self.is_large(content))

    def step(self, tape: Tape) -> None:
        """Reduce gradients, compute their norm, run the optimizer, and gather the new parameters.

        A rank copies its own gradients as they are reduced (copy_grads_in_partition), in mixed precision its partition.
        """
        own, width, first = sum(self.gradients), self.precision.accumulate_bytes, self.sizes[0]
        tape.live["buffers_bucket"] = self.widths.backward_buffer_bytes
        if self.holds_gradients_twice:  # it widens a copy of one after the other (bf16_optimizer.py, _update_hp_grad)
            super().step(tape)
            tape.touch(gradients=own, temporaries=width * max(self.sizes))
        elif self.offloads:
            # When the first gradient, the embedding's, is reduced by itself, there are the rank's partition of the sums
            # in mixed precision (_get_compact_grad_partition_slice), and a copy in fp64 for the norm of what the rank
            # has of it (copy_grads_in_partition, set_norm_for_param_grad_in_gpu).
            super().step(tape)
            copied = FP64_BYTES * min(first, self.partition) * (first > self.widths.reduce_bucket_elements)
            tape.touch(gradients=own, temporaries=copied + width * self.partition * self.is_mixed)
        else:
            for rank in self.ranks:
                copied = self.partition if self.is_mixed else rank.owned
                tape.touch(gradients=width * self.waiting(rank), temporaries=width * copied)
            self.flat_step(tape, has_others=self.is_mixed)
        tape.drop("buffers_bucket")
        if self.is_cpu:
            tape.touch(gradients=own * self.holds_gradients_twice, buffers_gathered=self.gathered_copy())


def rank_partitions(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> Sequence[RankPartition]:
    """Return the partitions among which those with the most of anything are, in order.

    Stages 1 and 2 divide all trained parameters as one tensor. A rank within one parameter has no more than the ranks
    in which that parameter begins and ends.
    """
    return _rank_partitions(model, without_data_parallelism(layout), tuple(stages), layout.dp_shard)


@lru_cache(maxsize=256)
def _rank_partitions(
    model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int
) -> Sequence[RankPartition]:
    sizes = local_sizes(model, layout, stages, trained=True)
    part, ends = sum(sizes) / shards, list(accumulate(sizes))
    begins = [end - size for size, end in zip(sizes, ends, strict=True)]
    borders = {int(end / part) + offset for end in (0.0, *ends) for offset in (-1, 0, 1)}
    result = []
    for rank in sorted(rank for rank in borders if 0 <= rank < shards):
        low, high = rank * part, (rank + 1) * part
        own = range(bisect.bisect_right(ends, low), bisect.bisect_left(begins, high))
        largest = max(min(ends[number], high) - max(begins[number], low) for number in own)
        result.append(RankPartition(rank, own[0], [math.ceil(sizes[number]) for number in own], math.ceil(largest)))
    return result
