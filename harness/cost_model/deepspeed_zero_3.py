"""The memory of DeepSpeed's stage 3 (deepspeed/runtime/zero/stage3.py) for whole parameters and gradients. No torch."""

from functools import cached_property

from harness.cost_model.deepspeed_zero_2 import BucketedZero
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.sharding import Pass
from harness.cost_model.tape import Tape
from harness.cost_model.whole_parameters import WholeParameters, coordinator_options, whole_parameters


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
        options = coordinator_options(self.config.strategy.options)
        return whole_parameters(self.config.model, self.config.checkpointing, options, self.is_cpu)

    def gather(self, tape: Tape, *moment: str | int) -> None:
        """Change the elements of whole parameters to those of a moment."""
        tape.live["buffers_whole"] = self.whole_parameters[moment] * self.widths.gathered

    def forward(self, tape: Tape, each: Pass, following: int) -> None:
        """Gather a layer's modules one after another, or the head."""
        if following < 0:
            self.gather(tape, "forward", "head", "gather")
        else:
            self.gather(tape, "forward", each.groups.layers - 1 - following)

    def end_forward(self, tape: Tape, each: Pass) -> None:
        """Free the head, but for the second forward of a loss in parts."""
        if self.shape.loss_chunks > 1:
            self.gather(tape, "backward", "head", "enter")
        else:
            self.gather(tape, "forward", "", "leave")

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
