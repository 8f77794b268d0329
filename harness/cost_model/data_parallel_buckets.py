"""The memory that torch's DistributedDataParallel takes for buckets. Imports no torch."""

from collections.abc import Sequence
from functools import cached_property

from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.tape import Tape
from harness.layout.partition import Stage, is_expert_weight, local_numel

# The sizes of DDP's buckets, by default; with bucket_cap_mb the first one is as large as all others.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


class DistributedDataParallel(Sharding):
    """torch.nn.parallel.DistributedDataParallel, whose buckets are as large as the model in its own width.

    As bucket views fp32 gradients lie in them; in mixed precision the buckets exist beside the fp32 gradients.
    """

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients lie in the buckets."""
        return self.config.strategy.gradient_as_bucket_view and not self.is_mixed

    @property
    def keeps_all_but_experts(self) -> bool:
        """Whether gradients of experts that are divided, which lie in no bucket, are new in every step."""
        return self.keeps_gradients and self.layout.ep_enabled

    @cached_property
    def gradients_at_start(self) -> list[int]:
        """The bytes of each stage's gradients in buckets."""
        sizes = (self.bucket_elements([stage]) * self.precision.accumulate_bytes for stage in self.stages)
        return [round(size * self.keeps_gradients) for size in sizes]

    def is_new(self, each: Pass) -> bool:
        """Return whether gradients of embedding and head do not lie in buckets already."""
        return super().is_new(each) and not self.keeps_all_but_experts

    def computed(self, each: Pass, following: int, own: int = 0) -> int:
        """Return the bytes of a pass's new gradients, which are those of experts where all others lie in buckets."""
        if not self.keeps_all_but_experts:
            return super().computed(each, following, own)
        experts = each.trained.experts.elements
        done = following * experts + min(own, experts)
        return round(each.new_gradients * done / (each.trained.layers * experts))

    @cached_property
    def bucket_bytes(self) -> int:
        """The bytes of the buckets that exist beside gradients."""
        copies = int(self.is_mixed) + int(not self.config.strategy.gradient_as_bucket_view)
        return round(copies * self.bucket_elements(self.stages) * self.precision.compute_bytes)

    def bucket_elements(self, stages: Sequence[Stage]) -> float:
        """Return the elements of some stages' gradients that lie in buckets: all but those of divided experts."""
        return sum(size for stage in stages for size in self.bucket_sizes(stage))

    def bucket_sizes(self, stage: Stage) -> list[float]:
        """Return the elements of a stage's parameters that lie in buckets, in their order."""
        sizes, has_experts = local_numel(self.config.model, self.layout, stage, True), not self.layout.ep_enabled
        return [size for name, size in sizes.items() if has_experts or not is_expert_weight(name)]

    @cached_property
    def buffer_bytes(self) -> int:
        """The bytes of buffers, buckets included."""
        return super().buffer_bytes + self.bucket_bytes

    @property
    def rebuilds_buckets(self) -> bool:
        """Whether it allocates its buckets anew in a timed step.

        It does so once, before the first forward of the second step (torch.nn.parallel.distributed, _pre_forward).
        """
        return self.config.train.warmup_steps == 1

    def old_bucket_bytes(self, stage: Stage) -> int:
        """Return the bytes of a stage's first buckets if they still exist beside those that a timed step allocates.

        In mixed precision the engine refers to the buckets that it reduced last until it reduces the first one anew.
        """
        exist = self.rebuilds_buckets and self.is_mixed
        return round(self.bucket_elements([stage]) * self.precision.compute_bytes) * exist

    def kept_bytes(self, index: int, has_forwards: bool, has_gradients: bool) -> int:
        """Return the old buckets."""
        return self.old_bucket_bytes(self.stages[index])

    def begin(self, each: Pass) -> None:
        """Keep the old buckets."""
        each.put(buffers_old=self.old_bucket_bytes(each.activations.stage))

    def head_gradient(self, each: Pass) -> None:
        """Copy the head's 16-bit gradient to a bucket where ranks reduce it, which adds the sum so far to an fp32 copy.

        The first bucket that is reduced has the head alone, unless that is small. The old buckets are freed before.
        """
        if not (self.is_mixed and each.is_last) or self.is_new(each) or self.is_tied:
            super().head_gradient(each)
            return
        gradient = self.shape.whole_hidden_bytes + self.vocabulary_grad_bytes
        each.put(gradients=self.computed(each, 0), temporaries=gradient)
        if self.vocabulary_grad_bytes >= self.bucket_limits[0]:
            each.drop("buffers_old")
            each.touch(temporaries=gradient + self.vocabulary_grad_bytes * FP32_BYTES // self.shape.width)

    def enter_layer(self, each: Pass, following: int) -> None:
        """Free the old buckets in the last backward of a step, once it has filled the first new one."""
        super().enter_layer(each, following)
        each.put()
        head = 0 if self.is_tied else each.trained.head.elements
        limit = self.bucket_limits[0] / self.precision.compute_bytes
        if each.is_last and head + (following + 1) * each.trained.layer.elements >= limit:
            each.drop("buffers_old")

    def end(self, each: Pass) -> None:
        """Reduce the last buckets in fp32 copies of 16-bit ones, while the sums so far exist."""
        stage = each.activations.stage
        if each.is_last:
            each.drop("buffers_old")
        if self.is_mixed and each.is_last and not each.new_gradients:
            copied = FP32_BYTES * self.last_bucket_elements(stage) + self.vocabulary_grad_bytes * stage.holds_embedding
            each.touch(gradients=0, temporaries=round(copied))
        super().end(each)

    @cached_property
    def bucket_limits(self) -> tuple[int, int]:
        """The bytes from which on the first bucket is closed, and each other one."""
        if mebibytes := self.config.strategy.ddp_options.get("bucket_cap_mb"):
            return int(mebibytes) * 2**20, int(mebibytes) * 2**20
        return FIRST_BUCKET_BYTES, BUCKET_BYTES

    def last_bucket_elements(self, stage: Stage) -> float:
        """Return the elements of the larger one of the two buckets that are reduced last.

        Buckets are filled in the order in which gradients are computed, and each is closed once it has reached its
        limit (torch.nn.parallel.distributed, _DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb).
        """
        (limit, cap), buckets = self.bucket_limits, [0.0]
        for size in reversed(self.bucket_sizes(stage)):
            if buckets[-1] * self.precision.compute_bytes >= limit:
                limit = cap
                buckets.append(0)
            buckets[-1] += size
        return max(buckets[-2:])

    def step(self, tape: Tape) -> None:
        """Run the optimizer; allocate the buckets anew while gradients of a micro-batch lie in the old ones."""
        super().step(tape)
        if self.rebuilds_buckets and self.micro_batches > 1:
            in_buckets = sum(self.gradients_at_start)
            tape.phase = "forward"
            tape.touch(gradients=in_buckets, temporaries=in_buckets + self.bucket_bytes)
