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
    """Parameters that stay whole until the end of a step, and whole gradients that are reduced there.

    By torch/distributed/pipelining/stage.py, backward_maybe_with_nosync and perform_reduce_grad: no backward reduces or
    frees. A group's gradients add up in the width of the reduction, if that is wider one by one when the group is left
    (_fsdp_param.py, to_accumulated_grad_if_needed and accumulate_unsharded_grad_if_needed). All groups are reduced
    after the last backward.
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
        """Return that no flat tensor of gradients waits for the next pass."""
        return 0

    def reshard(self, each: Pass, layers: int) -> None:
        """Leave parameters whole."""

    def add_up(self, each: Pass, group: ShardGroup, gradients: int) -> None:
        """Let a group's gradients become the sums, of which there are so many bytes then, or add them to these."""
        if each.new_gradients or not self.widens:
            each.put(gradients=gradients, buffers_gradients=group.last * self.shape.width * self.widens)
        else:  # a CPU widens them first
            widened = group.largest * FP32_BYTES * self.is_cpu
            each.put(buffers_gradients=group.elements * self.shape.width, temporaries_weight=widened)
        each.drop("buffers_gradients", "temporaries_weight")

    def leave_head(self, each: Pass) -> None:
        """Add up the head's group; the root's matrix waits for the end."""
        each.drop("temporaries_head")
        if each.groups.head.elements:
            self.add_up(each, each.trained.head, self.computed(each, 0))
        elif each.new_gradients or self.widens:
            each.live["buffers_waiting"] = each.trained.waiting * self.shape.width

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Keep the gradients of a layer until the layer is left, or add each to its sum at once."""
        own = moment.weights * (each.new_gradients > 0 or self.widens) + moment.computed
        each.put(buffers_gradients=own * self.shape.width)

    def leave_layer(self, each: Pass, following: int) -> None:
        """Add up the gradients of a layer."""
        self.add_up(each, each.trained.layer, self.computed(each, following + 1))

    def collect(self, each: Pass) -> None:
        """Let the gradients of a backward for weights alone become the sums."""
        each.put(gradients=each.new_gradients)

    def end(self, each: Pass) -> None:
        """Compute the embedding's gradient, and add up the last group. A tied matrix has two, and their sum."""
        groups = each.trained
        each.drop("buffers_flat", "buffers_waiting")
        if each.activations.stage.holds_embedding:
            elements = groups.embedding.elements + groups.root.elements + 2 * groups.waiting
            each.put(buffers_gradients=elements * self.shape.width, temporaries=self.shape.whole_hidden_bytes)
        each.live["temporaries"] = 0
        self.add_up(each, groups.last_reduced, each.new_gradients)

    def step(self, tape: Tape) -> None:
        """Free the whole parameters of each group and reduce its gradients, the root's first; then update the shards.

        Of the layers, which are alike, the first is reduced beside the most.
        """
        width, shards = self.unreduced_width, 0
        gradients, whole = sum(self.gradients), [self.whole_groups(groups, groups.layers) for groups in self.groups]
        tape.live |= {"gradients": gradients, "buffers_whole": sum(whole)}
        for groups, trained in zip(self.groups, self.trained, strict=True):
            for own, group in (
                (groups.root, trained.root),
                (groups.embedding, trained.embedding),
                (groups.layer, trained.layer),
            ):
                gradients -= group.elements * width
                tape.live["buffers_whole"] -= self.whole(own)
                tape.live["gradients"] = gradients + shards
                self.reduce(tape, group)
                shards += self.reduced(group) // self.degree
        of_shards = sum(groups.padded for groups in self.trained) * width // self.degree
        tape.drop("buffers_whole", "buffers_reduced", "buffers_gradients")
        tape.touch(gradients=of_shards, temporaries=self.update_bytes)
