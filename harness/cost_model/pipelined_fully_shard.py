"""The memory of fully_shard in a pipeline of torch's that knows of it, as torchtitan's does. Imports no torch."""

from functools import cached_property

from harness.cost_model.fully_shard import FullyShard
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.shard_groups import ShardGroup, ShardGroups
from harness.cost_model.sharding import Pass
from harness.cost_model.tape import Tape
from harness.layout.partition import Stage


class PipelinedFullyShard(FullyShard):
    """Whole parameters and gradients of each stage from its first forward of a step to its last backward.

    By torch/distributed/pipelining/stage.py, backward_maybe_with_nosync and perform_reduce_grad: no backward reduces or
    frees. A group's gradients add up in the width of the reduction, if that is wider one by one when the group is left
    (_fsdp_param.py, to_accumulated_grad_if_needed and accumulate_unsharded_grad_if_needed). All groups of a stage are
    reduced after its last backward. A stage that does not hold both ends has no other groups than layers and the root.
    """

    @cached_property
    def gradients(self) -> list[int]:
        """The bytes of each stage's whole gradients."""
        return [groups.elements * self.precision.reduce_bytes for groups in self.trained]

    @property
    def widens(self) -> bool:
        """Whether sums of gradients are wider than backward computes them."""
        return self.precision.reduce_bytes > self.shape.width

    @property
    def unreduced_width(self) -> int:
        """The bytes of an element of the sums."""
        return self.precision.reduce_bytes

    def retained(self, groups: ShardGroups, stage: Stage) -> int:
        """Return the bytes of gradients that a backward for weights alone leaves to the stage's next one to widen.

        The first stage's is a whole backward, as its inputs need no gradients.
        """
        is_split = self.layout.splits_backward and not stage.holds_embedding
        return groups.elements * self.shape.width * (self.widens and is_split)

    def gradients_after(self, index: int, backwards: int) -> int:
        """Return the bytes of whole gradients, or of shards after the stage's last backward."""
        return self.shards_of(index) if backwards == self.micro_batches else super().gradients_after(index, backwards)

    def shards_of(self, index: int) -> int:
        """Return the bytes of the shards of a stage's gradients."""
        return self.trained[index].padded * self.unreduced_width // self.degree

    def reshard(self, each: Pass, layers: int) -> None:
        """Leave parameters whole."""

    def add_up(self, each: Pass, group: ShardGroup, gradients: int) -> None:
        """Let a group's gradients become the sums, of which there are so many bytes then, or add them to these."""
        if each.new_gradients or not self.widens:
            each.put(gradients=gradients, buffers_gradients=group.largest * self.shape.width * self.widens)
        else:  # a CPU widens them first
            widened = group.largest * FP32_BYTES * self.is_cpu
            each.put(buffers_gradients=group.elements * self.shape.width, temporaries_weight=widened)
        each.drop("buffers_gradients", "temporaries_weight")

    def leave_head(self, each: Pass) -> None:
        """Keep the gradient of the root's matrix until the end."""
        each.drop("temporaries_head")
        if each.new_gradients or self.widens:
            each.live["buffers_waiting"] = each.trained.waiting * self.shape.width

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Keep the gradients of a layer until the layer is left, or add each to its sum at once."""
        own = moment.weights * (each.new_gradients > 0 or self.widens) + moment.computed
        each.put(buffers_gradients=own * self.shape.width)

    def leave_layer(self, each: Pass, following: int) -> None:
        """Add up the gradients of a layer."""
        groups = each.trained
        self.add_up(each, groups.layer, self.computed(each, following + 1))
        left = (groups.elements - (following + 1) * groups.layer.elements) * self.shape.width
        each.live["buffers_reduced"] = min(each.live["buffers_reduced"], left)

    def collect(self, each: Pass) -> None:
        """Let the gradients of a backward for weights alone become the sums, or stay beside them."""
        each.put(gradients=each.new_gradients)
        self.reduce_stage(each)

    def end(self, each: Pass) -> None:
        """Compute the embedding's gradient, and add up the last group."""
        each.drop("buffers_flat", "buffers_waiting")
        if each.activations.stage.holds_embedding:
            gradients = each.trained.root.elements * self.shape.width
            each.put(buffers_gradients=gradients, temporaries=self.shape.whole_hidden_bytes)
        each.live["temporaries"] = 0
        each.drop("buffers_reduced")
        self.add_up(each, each.trained.last_reduced, each.new_gradients)
        self.reduce_stage(each)

    def reduce_stage(self, each: Pass) -> None:
        """After the last backward free the whole parameters of each group and reduce its gradients, the root's first.

        Of the layers, which are alike, the first is reduced beside the most.
        """
        if not each.is_last:
            return
        groups, trained = each.groups, each.trained
        for own, group in ((groups.root, trained.root), (groups.layer, trained.layer)):
            each.live["buffers_whole"] -= self.whole(own)
            each.live["gradients"] -= group.elements * self.unreduced_width
            self.reduce(each, group)
            each.live["gradients"] += self.reduced(group) // self.degree

    def step(self, tape: Tape) -> None:
        """Update the shards."""
        gradients = sum(map(self.shards_of, range(len(self.trained))))
        tape.touch(gradients=gradients, temporaries=self.update_bytes)
