"""The memory of DDP's buckets (torch.nn.parallel.distributed). Imports no torch."""

from collections.abc import Sequence
from functools import cached_property

from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.tape import Tape
from harness.layout.partition import Stage, local_numel, local_sizes

# The sizes of DDP's buckets, by default.
FIRST_BUCKET_BYTES = 2**20
BUCKET_MEBIBYTES = 25


class DistributedDataParallel(Sharding):
    """torch.nn.parallel.DistributedDataParallel, whose buckets are as large as the model in its own width.

    As bucket views fp32 gradients lie in them; in mixed precision the buckets exist beside the fp32 gradients.
    """

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients lie in the buckets."""
        return self.config.strategy.gradient_as_bucket_view and not self.is_mixed

    def bucket_elements(self, stages: Sequence[Stage]) -> float:
        """Return the elements of the buckets of these stages."""
        return sum(local_sizes(self.config.model, self.layout, stages))

    @cached_property
    def bucket_bytes(self) -> int:
        """The bytes of the buckets that exist beside gradients."""
        copies = int(self.is_mixed) + int(not self.config.strategy.gradient_as_bucket_view)
        return round(copies * self.bucket_elements(self.stages) * self.precision.compute_bytes)

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

    def begin(self, tape: Tape, each: Pass) -> None:
        """Keep the old buckets."""
        tape.put(buffers_old=self.old_bucket_bytes(each.activations.stage))

    def enter_layer(self, tape: Tape, each: Pass, following: int) -> None:
        """Free the old buckets in the last backward of a step, once it has filled the first new one."""
        super().enter_layer(tape, each, following)
        tape.put()
        head = 0 if self.config.model.tie_word_embeddings else each.groups.head.elements
        limit = FIRST_BUCKET_BYTES / self.precision.compute_bytes
        if each.is_last and head + (following + 1) * each.groups.layer.elements >= limit:
            tape.drop("buffers_old")

    def end(self, tape: Tape, each: Pass) -> None:
        """Reduce the last buckets in fp32 copies of 16-bit ones, while the sums so far exist."""
        stage = each.activations.stage
        if each.is_last:
            tape.drop("buffers_old")
        if self.is_mixed and each.is_last and not each.new_gradients:
            copied = FP32_BYTES * self.last_bucket_elements(stage) + self.vocabulary_grad_bytes * stage.holds_embedding
            tape.touch(gradients=0, temporaries=round(copied))
        super().end(tape, each)

    def last_bucket_elements(self, stage: Stage) -> float:
        """Return the elements of the larger one of the two buckets that are reduced last.

        Buckets are filled in the order in which gradients are computed, and each is closed once it has reached its
        limit (torch.nn.parallel.distributed, _DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb).
        """
        cap = int(self.config.strategy.ddp_options.get("bucket_cap_mb", BUCKET_MEBIBYTES)) * 2**20
        limit, buckets = FIRST_BUCKET_BYTES, [0.0]
        for size in reversed(list(local_numel(self.config.model, self.layout, stage).values())):
            if buckets[-1] * self.precision.compute_bytes >= limit:
                limit = cap
                buckets.append(0)
            buckets[-1] += size
        return max(buckets[-2:])

    def step(self, tape: Tape) -> None:
        """Run the optimizer; allocate the buckets anew while gradients of a micro-batch lie in the old ones."""
        super().step(tape)
        if self.rebuilds_buckets and self.micro_batches > 1:
            in_buckets = sum(self.gradients) * self.keeps_gradients
            tape.phase = "forward"
            tape.touch(gradients=in_buckets, temporaries=in_buckets + self.bucket_bytes)
