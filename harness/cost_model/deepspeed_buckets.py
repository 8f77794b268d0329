"""The memory of DeepSpeed's stages 2 and 3 for gradients on their way to shards, and for whole parameters. No torch.

Functions that are named without a file are those of deepspeed/runtime/zero/stage_1_and_2.py, and for stage 3 of
stage3.py.
"""

from collections.abc import Sequence
from functools import cached_property

from harness.cost_model.deepspeed_zero import FP64_BYTES, DeepSpeedZero, partition_elements
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.sharding import Pass
from harness.cost_model.tape import Tape
from harness.cost_model.whole_parameters import CoordinatorOptions, WholeParameters, whole_parameters
from harness.layout.model_profile import model_profile
from harness.layout.partition import local_sizes


class BucketedZero(DeepSpeedZero):
    """Stages 2 and 3, which reduce gradients in buckets during backward.

    A gradient that fits is copied into the bucket and freed. A larger one is reduced by itself, when the next gradient
    arrives.
    """

    content = 0  # the elements in the bucket
    arrived = 0  # the elements of all gradients so far

    def played_layers(self, layers: int) -> Sequence[int]:
        """Return all layers, each of which finds another content in the bucket."""
        return range(layers)

    def is_large(self, elements: int) -> bool:
        """Return whether a gradient does not fit the bucket."""
        return elements > self.widths.reduce_bucket_elements

    def begin(self, tape: Tape, each: Pass) -> None:
        """Begin with an empty bucket."""
        self.content = self.arrived = 0

    def reduce(self, tape: Tape, each: Pass) -> None:
        """Reduce the content of the bucket, or the gradient that waits outside of it."""
        raise NotImplementedError

    def arrive(self, tape: Tape, each: Pass, elements: int) -> None:
        """Take a gradient, after what is in the bucket if both do not fit."""
        if self.content and self.is_large(self.content + elements):
            self.reduce(tape, each)
            self.content = 0
        self.content += elements
        self.arrived += elements
        waiting = self.content * self.is_large(self.content)
        tape.live |= {"buffers_gradient": 0, "buffers_waiting": waiting * self.precision.compute_bytes}

    def leave_head(self, tape: Tape, each: Pass) -> None:
        """Take the gradients of the head and of the norm before it."""
        if each.groups.head.elements:
            self.arrive(tape, each, each.groups.head.largest)
        self.arrive(tape, each, self.config.model.hidden_size)

    def in_layer(self, tape: Tape, each: Pass, following: int, moment: LayerMoment) -> None:
        """Take the gradient of a matrix, and those of its bias and of the norm of which it is the last reader."""
        hidden = self.config.model.hidden_size
        tape.put(buffers_gradient=moment.computed * self.precision.compute_bytes)
        if moment.is_accumulation:
            self.arrive(tape, each, moment.computed)
            if not moment.is_followed_by_matrix or model_profile(self.config.model).has_biases:
                self.arrive(tape, each, hidden)

    def end(self, tape: Tape, each: Pass) -> None:
        """Take the embedding's gradient, and reduce what is left.

        On CUDA the gradients of a tied matrix are summed beside both of them, on a CPU one is added to the other
        (torch/csrc/autograd/input_buffer.cpp).
        """
        elements = each.groups.embedding.elements or each.groups.root.elements
        gradient = elements * self.precision.compute_bytes
        other = gradient * self.config.model.tie_word_embeddings
        tape.touch(temporaries=self.shape.whole_hidden_bytes, buffers_gradient=gradient + other)
        tape.put(buffers_gradient=gradient + other * (1 if self.is_cpu else 2))
        tape.put(buffers_gradient=gradient + other * (self.is_cpu and self.layout.zero_stage == 2))
        self.arrive(tape, each, elements)
        self.reduce(tape, each)
        tape.put(gradients=each.new_gradients)


class ZeroStage2(BucketedZero):
    """Stage 2, which reduces gradients to the ranks that own them.

    In mixed precision it copies them in fp32, a large one a rank's part after another. One that lies in the partition
    of a single rank is copied whole; the plan for a CPU takes it to be divided evenly. Where a parameter lies in two
    partitions, the parts of a bucket that one rank owns are not next to each other, and are put together before
    (average_tensor and allreduce_no_retain). Under offload it then computes the norm of each parameter's gradient in
    fp64 (set_norm_for_param_grad_in_gpu).
    """

    is_allocated = False  # whether the rank's partition of gradients is

    @cached_property
    def owned_elements(self) -> int:
        """The elements of all parameters that lie in the partition, at least in part."""
        return round(partition_elements(self.config.model, self.layout, self.stages))

    @cached_property
    def large_gradient_bytes(self) -> int:
        """The bytes of the partition's gradients that are kept until the end of backward on CUDA.

        These are larger than a bucket, and in mixed precision beside the partition of fp32 sums.
        """
        smallest = self.widths.reduce_bucket_elements
        large = round(partition_elements(self.config.model, self.layout, self.stages, smallest))
        return self.precision.compute_bytes * large * (self.is_mixed and not self.offloads)

    @cached_property
    def gradients(self) -> list[int]:
        """The bytes of gradients at the end of a backward.

        In mixed precision they are the rank's partition in fp32 (_build_compact_grad_partition_buffer), and the
        gradients, as it computes them, of those parameters in the partition that are larger than a bucket. The
        embedding's comes last and is among the buffers. The plan for a CPU takes all parameters in the partition in the
        widths' bytes.
        """
        if self.offloads:
            return super().gradients
        if self.is_cpu or not self.is_mixed:
            return [self.widths.gradients * self.owned_elements]
        return [self.precision.accumulate_bytes * self.partition + self.large_gradient_bytes]

    @cached_property
    def sums(self) -> list[int]:
        """The bytes of the sums to which the gradients of a micro-batch are added at the end of its backward."""
        if not self.offloads and self.is_mixed and not self.is_cpu:
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

    def computed(self, each: Pass, following: int) -> int:
        """Return the bytes of the partition, if it is allocated."""
        return each.new_gradients * self.is_allocated

    def begin(self, tape: Tape, each: Pass) -> None:
        """Begin without the partition."""
        super().begin(tape, each)
        self.is_allocated = False

    def head_gradient(self, tape: Tape, each: Pass) -> None:
        """Allocate the bucket with the first gradient."""
        super().head_gradient(tape, each)
        tape.live["buffers_bucket"] = self.widths.backward_buffer_bytes

    def leave_head(self, tape: Tape, each: Pass) -> None:
        """Take the head's gradient; a large one is reduced, on a CPU beside the partition."""
        self.is_allocated = self.is_cpu and self.is_large(each.groups.head.largest)
        tape.live["gradients"] = self.computed(each, 0)
        super().leave_head(tape, each)

    def reduce(self, tape: Tape, each: Pass) -> None:
        """Copy gradients and reduce them, which allocates the partition if none did before.

        In mixed precision it is allocated first (_get_compact_grad_partition_slice), else by copy_grads_in_partition.
        """
        is_head = self.arrived == each.groups.head.largest > 0
        gradients = each.new_gradients - self.large_gradient_bytes * (is_head and not self.is_cpu)
        if self.is_mixed and not self.is_cpu:
            tape.live["gradients"] = gradients
        tape.touch(buffers_copies=self.copies(self.content))
        tape.put(gradients=gradients)
        self.is_allocated = True

    def end(self, tape: Tape, each: Pass) -> None:
        """Allocate the partition on a CPU, where gloo's threads refer to their copies until then."""
        self.is_allocated |= self.is_cpu
        tape.live["gradients"] = self.computed(each, 0)
        super().end(tape, each)

    def copies(self, content: int) -> int:
        """Return the bytes of the copies of so many elements, the last of all that have arrived."""
        wire = self.precision.reduce_bytes * self.is_mixed
        norm = FP64_BYTES * self.offloads
        partition = sum(local_sizes(self.config.model, self.layout, self.stages)) / self.layout.dp_shard
        if self.is_large(content):
            part = content / self.layout.dp_shard if self.is_cpu else min(content, partition)
            return round(max(part * wire, (content if self.is_cpu else part) * norm))
        begin, end = self.arrived - content, self.arrived - 1
        is_divided = content > 0 and int(begin / partition) < int(end / partition)
        largest = self.groups[0].layer.largest
        in_norm = min(content, 0 if self.is_large(largest) else largest) * norm
        return max(content * (wire + self.precision.compute_bytes * is_divided), in_norm)

    def step(self, tape: Tape) -> None:
        """Copy a partition that is not flat; compute the norm in fp64, and gather the new parameters."""
        super().step(tape)
        copied = 0 if self.is_cpu or self.is_mixed else self.copied_bytes
        tape.touch(gradients=sum(self.gradients), temporaries=copied)
        if self.is_cpu:
            tape.touch(buffers_gathered=self.gathered_copy() - self.widths.buffer_bytes * (not self.offloads))
        elif not self.offloads:
            tape.touch(gradients=sum(self.sums), temporaries=FP64_BYTES * min(max(self.sizes), self.partition))


class ZeroStage3(BucketedZero):
    """Stage 3, which gathers parameters module by module.

    A large gradient is cast to the width of the reduction before. Gradients are then copied into a flat tensor unless
    it is a single one of equal parts (coalesced_collectives.py), and gloo copies that once more.
    """

    keeps_gradients = True
    matrices_behind = 0  # those of a layer that backward has left

    @cached_property
    def whole_parameters(self) -> WholeParameters:
        """The elements of whole parameters in a micro-batch."""
        names, options = CoordinatorOptions._fields, self.config.strategy.options
        stated = {name: options[f"stage3_{name}"] for name in names if f"stage3_{name}" in options}
        rules = CoordinatorOptions(**{name: int(float(str(value))) for name, value in stated.items()})
        return whole_parameters(self.config.model, self.config.checkpointing, rules, self.is_cpu)

    def gather(self, tape: Tape, *moment: str | int) -> None:
        """Change the elements of whole parameters to those of a moment."""
        tape.live["buffers_whole"] = self.whole_parameters[moment] * self.widths.gathered

    def forward(self, tape: Tape, each: Pass, following: int) -> None:
        """Gather a layer's modules one after another, or the head."""
        layer = each.groups.layers - 1 - following
        self.gather(tape, "forward", *([layer] if following >= 0 else ["head", "gather"]))

    def end_forward(self, tape: Tape, each: Pass) -> None:
        """Free the head, but for the second forward of a loss in parts."""
        runs_again = self.shape.loss_chunks > 1
        self.gather(tape, *(("backward", "head", "enter") if runs_again else ("forward", "", "leave")))

    def enter_backward(self, tape: Tape, each: Pass) -> None:
        """Gather the head again."""
        self.gather(tape, "backward", "head", "gather")
        tape.put()
        self.gather(tape, "backward", "head", "enter")

    def head_gradient(self, tape: Tape, each: Pass) -> None:
        """Free the head."""
        super().head_gradient(tape, each)
        self.gather(tape, "backward", "norm", "enter")

    def enter_layer(self, tape: Tape, each: Pass, following: int) -> None:
        """Begin with the layer's last matrix."""
        self.matrices_behind = 0

    def in_layer(self, tape: Tape, each: Pass, following: int, moment: LayerMoment) -> None:
        """Gather the parameters of the matrices one after another."""
        kind = "forget" if moment.is_accumulation else "compute"
        layer = each.groups.layers - 1 - following
        self.gather(tape, "backward", layer, kind if moment.computed else "between", self.matrices_behind)
        self.matrices_behind += moment.is_accumulation
        super().in_layer(tape, each, following, moment)

    def end(self, tape: Tape, each: Pass) -> None:
        """Gather the embedding."""
        self.gather(tape, "backward", "embedding", "enter")
        super().end(tape, each)

    def reduce(self, tape: Tape, each: Pass) -> None:
        """Reduce gradients, of which copies are made; what is in the bucket has the width of the reduction already."""
        is_large, wire = self.is_large(self.content), self.precision.reduce_bytes
        copies = is_large * (wire != self.precision.compute_bytes) + self.is_cpu
        copies += not (is_large and self.content % self.layout.dp_shard == 0)
        tape.touch(buffers_copies=self.content * wire * copies)

    def step(self, tape: Tape) -> None:
        """Copy gradients for the optimizer, one sub-group after the other (_prepare_fp32_grad_for_sub_group)."""
        sub_group = self.precision.accumulate_bytes * int(self.config.strategy.options.get("sub_group_size", 1e9))
        copied = min(self.copied_bytes, sub_group)
        tape.touch(gradients=sum(self.gradients), temporaries=copied + self.foreach_bytes)
