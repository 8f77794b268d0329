"""The memory of DeepSpeed's stages 2 and 3 for gradients on their way to shards, in buckets. No torch.

Functions that are named without a file are those of deepspeed/runtime/zero/stage_1_and_2.py.
"""

from collections.abc import Sequence
from functools import cached_property

from harness.cost_model.deepspeed_zero import FP64_BYTES, DeepSpeedZero
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.sharding import Pass
from harness.cost_model.tape import Tape
from harness.cost_model.zero_plus_plus import exchange_buffer_width
from harness.layout.model_profile import model_profile


class BucketedZero(DeepSpeedZero):
    """Stages 2 and 3, which reduce gradients in buckets during backward.

    A gradient that fits is copied into the bucket and freed. A larger one is reduced by itself, when the next gradient
    arrives.
    """

    def played_layers(self, layers: int) -> Sequence[int]:
        """Return all layers, each of which finds another content in the bucket."""
        return range(layers)

    @property
    def norm_elements(self) -> int:
        """The elements of a norm's gradient, or a bias's; 0 if they are frozen."""
        return self.config.model.hidden_size * (not self.config.model.adapter.is_enabled)

    def begin(self, each: Pass) -> None:
        """Begin with an empty bucket."""
        self.content = 0  # the elements in the bucket
        self.arrived = 0  # the elements of all gradients so far

    def reduce(self, each: Pass) -> None:
        """Reduce the content of the bucket, or the gradient that waits outside of it, in copies.

        What is in the bucket has the width of the reduction already. A large gradient is cast to it. Gradients are then
        copied into a flat tensor unless it is a single one of equal parts (coalesced_collectives.py), and gloo copies
        that once more. Those that are exchanged are quantized one after another.
        """
        is_large, wire, devices = self.is_large(self.content), self.precision.reduce_bytes, self.widths.exchange_devices
        copies = is_large * (wire != self.precision.compute_bytes) + self.is_cpu
        copies += not devices and not (is_large and self.content % self.degree == 0)
        exchanged = min(self.content, max(self.sizes)) * exchange_buffer_width(self.degree, devices)
        each.touch(buffers_copies=self.content * wire * copies + round(exchanged))

    def arrive(self, each: Pass, elements: int) -> None:
        """Take a gradient, if there is one, after what is in the bucket if both do not fit."""
        if elements and self.content and self.is_large(self.content + elements):
            self.reduce(each)
            self.content = 0
        self.content += elements
        self.arrived += elements
        waiting = self.content * self.is_large(self.content)
        each.live |= {"buffers_gradient": 0, "buffers_waiting": waiting * self.precision.compute_bytes}

    def leave_head(self, each: Pass) -> None:
        """Take the gradients of the head and of the norm before it."""
        self.arrive(each, each.trained.head.largest)
        self.arrive(each, self.norm_elements)

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Take the gradient of a matrix, and those of its bias and of the norm of which it is the last reader."""
        each.put(buffers_gradient=moment.computed * self.precision.compute_bytes)
        if moment.is_accumulation:
            self.arrive(each, moment.computed)
            if not moment.is_followed_by_matrix or model_profile(self.config.model).has_biases:
                self.arrive(each, self.norm_elements)

    def end(self, each: Pass) -> None:
        """Take the embedding's gradient, and reduce what is left.

        The gradients of a tied matrix are summed beside both of them unless one is added to the other
        (torch/csrc/autograd/input_buffer.cpp), as the embedding's is to the sum of a head's in parts.
        """
        group = each.trained.embedding if each.trained.embedding.elements else each.trained.root
        gradient = group.largest * self.precision.compute_bytes
        other = gradient * self.config.model.tie_word_embeddings
        self.arrive(each, group.elements - group.largest)  # the positions' gradient
        each.touch(temporaries=self.shape.whole_hidden_bytes, buffers_gradient=gradient + other)
        each.put(buffers_gradient=gradient + other * (1 if self.sums_in_place or self.shape.loss_chunks > 1 else 2))
        each.put(buffers_gradient=gradient)
        self.arrive(each, group.largest)
        self.reduce(each)
        each.put(gradients=each.new_gradients)


class ZeroStage2(BucketedZero):
    """Stage 2, which reduces gradients to the ranks that own them.

    In mixed precision it copies them in fp32, a large one a rank's part after another. One that lies in the partition
    of a single rank is copied whole. What one rank owns of a bucket is reduced at a time, or the whole bucket to all
    ranks. It is put together before where a parameter lies in two partitions, and by its owner in mixed precision
    (average_tensor and allreduce_no_retain). Under offload it then computes the norm of each parameter's gradient in
    fp64 (set_norm_for_param_grad_in_gpu). gloo copies none of it, but its threads may free what was put together late.
    """

    @cached_property
    def owned_elements(self) -> int:
        """The elements of all parameters that lie in the partition, at least in part."""
        return max(rank.owned for rank in self.ranks)

    @cached_property
    def large_gradient_bytes(self) -> int:
        """The bytes of the partition's gradients that are kept until the end of backward.

        These are larger than a bucket, and in mixed precision beside the partition of fp32 sums.
        """
        large = max(self.large_elements(rank.sizes[rank.first == 0 :]) for rank in self.ranks)
        return self.precision.compute_bytes * large * (self.is_mixed and not self.offloads)

    @cached_property
    def gradients(self) -> list[int]:
        """The bytes of gradients at the end of a backward.

        In mixed precision they are the rank's partition in fp32 (_build_compact_grad_partition_buffer), and the
        gradients, as it computes them, of those parameters in the partition that are larger than a bucket. The
        embedding's comes last and is among the buffers.
        """
        if self.offloads:
            return super().gradients
        if not self.is_mixed:
            return [self.widths.gradients * self.owned_elements]
        return [self.precision.accumulate_bytes * self.partition + self.large_gradient_bytes]

    @cached_property
    def sums(self) -> list[int]:
        """The bytes of the sums to which the gradients of a micro-batch are added at the end of its backward."""
        if not self.offloads and self.is_mixed:
            return [self.precision.accumulate_bytes * self.partition]
        width, own = self.widths.gradients, self.gradients
        return [size * min(width, self.precision.accumulate_bytes) // width for size in own] if width else own

    @cached_property
    def host_gradient_bytes(self) -> int:
        """The bytes of gradients on a CPU: each parameter's sum, whole, beside the flat gradients that AdamW reads."""
        even, width = super().host_gradient_bytes, self.widths.host_gradients
        if not self.is_cpu or width <= FP32_BYTES:
            return even
        return even * FP32_BYTES // width + (width - FP32_BYTES) * self.owned_elements

    def begin(self, each: Pass) -> None:
        """Begin with an empty bucket."""
        super().begin(each)
        self.large = 0  # the elements of the gradients larger than a bucket that were reduced

    def computed(self, each: Pass, following: int, own: int = 0) -> int:
        """Return nothing: the partition is allocated as a whole, with the first reduction."""
        return 0

    def enter_layer(self, each: Pass, following: int) -> None:
        """Allocate nothing with a layer."""

    def reduce(self, each: Pass) -> None:
        """Copy gradients and reduce them, which allocates the partition if none did before.

        In mixed precision it is allocated first (_get_compact_grad_partition_slice), else by copy_grads_in_partition.
        """
        content, wire, norm = self.content, self.precision.reduce_bytes * self.is_mixed, FP64_BYTES * self.offloads
        part = content if self.widths.all_reduces_gradients else self.largest_part(self.arrived - content, content)
        if self.is_large(content):
            copies = round(min(content, self.partition) * max(wire, norm))
        else:
            largest = self.trained[0].layer.largest
            is_joined = self.is_mixed or part < content or self.widths.all_reduces_gradients
            in_norm = min(content, 0 if self.is_large(largest) else largest) * norm
            copies = max(part * (wire + self.precision.compute_bytes * is_joined), in_norm)
        if self.is_mixed:
            each.live["gradients"] = self.gradients_so_far(each)
        each.touch(buffers_copies=copies)
        each.put(gradients=self.gradients_so_far(each))
        self.large += content * self.is_large(content)
        each.live["gradients"] = self.gradients_so_far(each)

    def largest_part(self, begin: int, elements: int) -> int:
        """Return the most of these elements that lie in a partition; `begin` counts from the end of the parameters."""
        first = min(elements, self.partition - begin % self.partition)
        return max(first, min(elements - first, self.partition))

    def gradients_so_far(self, each: Pass) -> int:
        """Return the bytes of a pass's gradients, of which the large ones are kept as they are reduced.

        The plan takes those of the rank to be the first.
        """
        missing = max(0, self.large_gradient_bytes - self.large * self.precision.compute_bytes)
        return each.new_gradients - missing

    def step(self, tape: Tape) -> None:
        """Compute the norm, run the optimizer, and gather the new parameters."""
        if self.offloads:
            super().step(tape)
        else:
            self.flat_step(tape)
        if self.is_cpu:
            tape.touch(buffers_gathered=self.gathered_copy())
