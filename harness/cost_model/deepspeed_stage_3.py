"""The memory of DeepSpeed's stage 3 for whole parameters. No torch.

Functions that are named without a file are those of deepspeed/runtime/zero/stage3.py.
"""

from functools import cached_property

from harness.cost_model.deepspeed_buckets import BucketedZero
from harness.cost_model.deepspeed_zero import FP64_BYTES
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.sharding import Pass
from harness.cost_model.tape import Tape
from harness.cost_model.whole_parameters import OPTIONS, WholeParameters, whole_parameters
from harness.cost_model.zero_plus_plus import FP16_BYTES, WEIGHT_BYTES
from harness.layout.layer_spec import layer_matrices


class ZeroStage3(BucketedZero):
    """Stage 3, which gathers parameters module by module.

    A parameter's secondary shard is copied from it when a module leaves it for the first time in a step, and forgotten
    after the update (partition_parameters.py, _partition_param_sec).
    """

    keeps_gradients = True

    @cached_property
    def secondary_bytes(self) -> int:
        """The bytes of the rank's secondary shards, padded as its own shards are."""
        small, parts = self.options[-1], self.layout.secondary_shards  # small parameters stay whole
        elements = sum(-(-size // self.degree) * self.degree // parts for size in self.sizes if size > small)
        return elements * self.widths.gathered * (parts > 1)

    @cached_property
    def options(self) -> tuple[int, ...]:
        """The values of OPTIONS."""
        stated = self.config.strategy.options
        return tuple(int(float(str(stated.get(name, default)))) for name, default in OPTIONS.items())

    def begin(self, each: Pass) -> None:
        """Keep the secondary shards of earlier micro-batches."""
        super().begin(each)
        each.live["buffers_secondary"] = self.secondary_bytes * (not each.is_first)

    @cached_property
    def whole_parameters(self) -> WholeParameters:
        """The elements of whole parameters in a micro-batch."""
        return whole_parameters(self.config.model, self.config.checkpointing, self.options, self.is_cpu)

    @cached_property
    def saved_matrices(self) -> list[int]:
        """The bytes of a layer's matrices if torchao multiplies them, whose saved views keep their memory."""
        is_scaled = self.config.precision.has_recipe
        return [matrix.elements * self.widths.gathered * is_scaled for matrix in layer_matrices(self.config.model)]

    def keep_views(self, each: Pass, layer: int, matrices: int) -> None:
        """Keep the matrices of all layers before this one that are not computed again, and so many of its own."""
        before = sum(not self.config.checkpointing.recomputes_layer(index) for index in range(layer))
        each.live["buffers_views"] = before * sum(self.saved_matrices) + sum(self.saved_matrices[:matrices])

    def gather(self, tape: Tape, *moment: str | int) -> None:
        """Change the elements of whole parameters to those of a moment."""
        tape.live["buffers_whole"] = self.whole_parameters[moment] * self.widths.gathered

    def dequantize(self, each: Pass, elements: int) -> None:
        """Turn a module's integers into fp16, and these into the dtype of compute (AllGatherHandle.wait)."""
        width = WEIGHT_BYTES + FP16_BYTES * (self.precision.compute != "float16")
        if self.widths.quantizes_gathers:
            each.touch(buffers_dequantized=elements * width)

    def forward(self, each: Pass, following: int) -> None:
        """Gather a layer's modules one after another."""
        layer = each.groups.layers - 1 - following
        self.keep_views(each, layer, 0)
        self.gather(each, "forward", layer)

    def forward_head(self, each: Pass) -> None:
        """Gather the head."""
        self.keep_views(each, each.groups.layers, 0)
        self.gather(each, "forward", "head", "gather")

    def end_forward(self, each: Pass) -> None:
        """Free the head, but for the second forward of a loss in parts."""
        each.live["buffers_secondary"] = self.secondary_bytes
        self.gather(each, *(("backward", "head", "enter") if self.shape.loss_chunks > 1 else ("forward", "", "leave")))

    def enter_backward(self, each: Pass) -> None:
        """Gather the head again."""
        self.gather(each, "backward", "head", "gather")
        each.put()
        self.dequantize(each, max(each.trained.head.largest, each.trained.root.largest))
        self.gather(each, "backward", "head", "enter")

    def head_gradient(self, each: Pass) -> None:
        """Free the head."""
        super().head_gradient(each)
        self.gather(each, "backward", "norm", "enter")

    def enter_layer(self, each: Pass, following: int) -> None:
        """Begin with the layer's last matrix."""
        self.matrices_behind = 0  # those of the layer that backward has left

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Gather the parameters of the matrices one after another."""
        kind = "forget" if moment.is_accumulation else "compute"
        layer = each.groups.layers - 1 - following
        self.gather(each, "backward", layer, kind if moment.computed else "between", self.matrices_behind)
        self.keep_views(each, layer, len(self.saved_matrices) - self.matrices_behind)
        self.matrices_behind += moment.is_accumulation
        is_entered = moment.computed and not moment.is_accumulation and not each.live.get("buffers_gradient")
        self.dequantize(each, moment.computed if is_entered else 0)
        super().in_layer(each, following, moment)

    def end(self, each: Pass) -> None:
        """Gather the embedding, unless it is frozen."""
        each.drop("buffers_views")
        if not self.config.model.adapter.is_enabled:
            self.gather(each, "backward", "embedding", "enter")
            group = each.trained.embedding if each.trained.embedding.elements else each.trained.root
            # The gradients of positions, and of a tied matrix that the head computed, wait for the embedding's.
            waiting = group.elements - group.largest * (not self.config.model.tie_word_embeddings)
            each.live["buffers_gradient"] = waiting * self.precision.compute_bytes
            self.dequantize(each, group.largest)
            each.live["buffers_gradient"] = 0
        super().end(each)

    def step(self, tape: Tape) -> None:
        """Copy gradients for the optimizer, one sub-group after the other (_prepare_fp32_grad_for_sub_group).

        The norm takes a copy in fp64 of the shard of each gradient (get_grad_norm_direct).
        """
        sub_group = self.precision.accumulate_bytes * int(self.config.strategy.options.get("sub_group_size", 1e9))
        copied = min(self.copied_bytes, sub_group)
        tape.live["buffers_secondary"] = self.secondary_bytes
        tape.touch(gradients=sum(self.gradients), temporaries=copied + self.update_bytes)
        if not self.offloads:
            tape.touch(gradients=sum(self.gradients), temporaries=FP64_BYTES * -(-max(self.sizes) // self.degree))
