"""The memory that torch's fully_shard takes for whole parameters and gradients. Imports no torch."""

import math
from collections.abc import Sequence
from functools import cached_property

from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.optimizer_state import OptimizerTensor, row_shards
from harness.cost_model.shard_groups import ShardGroup, ShardGroups
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.tape import Tape
from harness.layout.partition import Stage
from harness.layout.state_widths import StateKind


class FullyShard(Sharding):
    """The order of allocations of torch.distributed.fsdp._fully_shard.

    By _fsdp_param_group.py and _fsdp_collectives.py, a group's parameters are gathered into a flat tensor and copied
    out of it, and in backward each group gathers the one before it in advance. A group's whole gradients are copied to
    a flat tensor, which is reduced to a shard, and which lives until the next group's gradients are copied, even in the
    next micro-batch. Secondary shards are copied from a whole group when forward leaves it, and freed when backward has
    copied the group out again. Where parameters stay whole (zero_stage 0 and 2), the first forward of a step gathers
    them, and its last backward frees each group as it goes. On a CPU gradients that do not divide evenly are padded in
    copies, and gloo copies what it transfers.
    """

    reduces_groups = True
    keeps_gradients = False

    @cached_property
    def reshards(self) -> bool:
        """Whether a group is gathered for each of its uses."""
        return self.layout.zero_stage == 3

    def counts_of(self, kind: StateKind) -> list[int]:
        """Return the elements of each stage's parameters with their padding."""
        return [groups.at_rest for groups in (self.groups if kind == "parameters" else self.trained)]

    @cached_property
    def updated(self) -> Sequence[OptimizerTensor]:
        """The tensors that the rank's optimizer updates, as padded as parameters."""
        return row_shards(self.config.model, self.layout, self.stages, self.degree)

    def kept_bytes(self, index: int, has_forwards: bool, has_gradients: bool) -> int:
        """Return a stage's parameters that stay whole, and the gradients that were reduced last."""
        groups = self.groups[index]
        whole = self.whole_groups(groups, groups.layers) * (not self.reshards and has_forwards)
        return whole + self.retained(self.trained[index], self.stages[index]) * has_gradients

    def retained(self, groups: ShardGroups, stage: Stage) -> int:
        """Return the bytes of the flat tensor of gradients that lives until a stage's next pass reduces a group.

        If every backward has a half for weights, that reduces groups in the order of modules. The first stage has
        nothing left to reduce then, and only frees the tensor.
        """
        if not self.layout.splits_backward or self.layout.schedule == "dualpipev":
            return self.reduced(groups.last_reduced)
        last = groups.head if groups.head.elements else groups.parts_of_layer[-1]
        return self.reduced(last) * (not stage.holds_embedding)

    def whole(self, group: ShardGroup) -> int:
        """Return the bytes of the gathered parameters, of which projections may be narrower."""
        width = self.widths.gathered
        narrower = width - self.config.gathered_matrix_bytes(width)
        return group.padded * width - math.floor(group.projections * narrower)

    def whole_groups(self, groups: ShardGroups, layers: int, has_head: bool = True) -> int:
        """Return the bytes of a stage's gathered groups with so many layers."""
        ends = self.whole(groups.embedding) + self.whole(groups.root) + self.whole(groups.head) * has_head
        return ends + layers * self.whole(groups.layer)

    def reduced(self, group: ShardGroup) -> int:
        """Return the bytes of the flat tensor of gradients."""
        return group.padded * self.precision.reduce_bytes

    @property
    def unreduced_width(self) -> int:
        """The bytes of an element of gradients that are about to be reduced."""
        return self.precision.compute_bytes

    def whole_but(self, each: Pass, layers: int, has_head: bool) -> int:
        """Return the bytes of all groups that stay whole without so many layers and perhaps the head."""
        return self.whole_groups(each.groups, each.groups.layers - layers, has_head)

    def secondary(self, elements: int) -> int:
        """Return the bytes of the rank's secondary shards of so many padded elements."""
        parts = self.layout.secondary_shards
        return elements * self.widths.gathered // parts * (parts > 1)

    def gather(self, tape: Tape, group: ShardGroup, parts: int = 1) -> None:
        """Gather a group into a flat tensor, which a single shard has not, beside that of the group before.

        It has several secondary shards, or else those of all ranks.
        """
        flat, parts = self.whole(group) * (group.shards > 1), parts if parts > 1 else group.shards
        # Shards of masters are cast to the gathered width before they are sent; frozen ones have it.
        cast = flat * group.trained // max(1, parts * group.padded) * self.is_mixed
        tape.touch(buffers_gathering=flat + cast + flat * self.is_cpu)
        tape.live["buffers_flat"] = flat

    def copy_out(self, each: Pass, group: ShardGroup, whole: int, flat_before: int = 0) -> None:
        """Copy a group out of its flat tensor, with which so many bytes are whole; moved rows are copied twice.

        In forward wait_for_unshard refers to the flat tensor of the group before until then.
        """
        each.put(buffers_whole=whole)
        each.touch(buffers_gathering=flat_before + group.moved * self.widths.gathered)

    def reshard(self, each: Pass, layers: int) -> None:
        """Free the group that backward has left; in the last backward of a step so many layers and the head."""
        if self.reshards:
            each.drop("buffers_whole")
        elif each.is_last:
            each.live["buffers_whole"] = self.whole_but(each, layers, has_head=False)

    def reduce(self, tape: Tape, group: ShardGroup) -> None:
        """Reduce a group's gradients, if it has any.

        At first all of them lie beside the flat tensor, and the last one whose rows were moved twice. When that is
        reduced, a loop in foreach_reduce still refers to the last of them. Experts that a single rank has are divided
        by the number of data-parallel ranks, into a third tensor.
        """
        if not group.elements:
            return
        width, flat = self.unreduced_width, self.reduced(group)
        copies = (group.elements + group.last_moved) * width + flat + group.uneven * width * self.is_cpu
        tape.put(buffers_gradients=0, buffers_reduced=0, buffers_copies=copies)
        copies = group.last * width + flat * self.is_cpu if group.shards > 1 else flat * (self.degree > 1)
        tape.put(buffers_reduced=flat, buffers_copies=flat // group.shards + copies)
        tape.drop("buffers_copies")

    def played_layers(self, layers: int) -> Sequence[int]:
        """Return also the second layer, the last one to gather another in advance: shards of gradients add up."""
        return sorted({*super().played_layers(layers), max(0, layers - 2)})

    def begin(self, each: Pass) -> None:
        """Gather what the first layer waits for."""
        groups, gathers = each.groups, self.reshards or each.gathers
        has_reduced = not each.is_first and each.kind != "weights"
        each.live["buffers_reduced"] = self.retained(each.trained, each.activations.stage) * has_reduced
        whole = 0 if gathers else self.whole_but(each, 0, has_head=True)
        each.put(buffers_root=self.whole(groups.root) * self.reshards, buffers_whole=whole)
        first = groups.root if groups.root.elements else groups.embedding
        each.live["buffers_flat"] = self.whole(first) * (gathers and self.degree > 1)

    def forward(self, each: Pass, following: int) -> None:
        """Gather a layer, and its experts where they are a group of their own."""
        groups = each.groups
        whole = self.whole(groups.layer) if self.reshards else self.whole_but(each, following, has_head=False)
        self.use(each, groups.parts_of_layer, whole, groups.layers - 1 - following)

    def forward_head(self, each: Pass) -> None:
        """Gather the head if it is a group of its own."""
        groups = each.groups
        whole = self.whole(groups.head) if self.reshards else self.whole_but(each, 0, has_head=True)
        self.use(each, [groups.head] * (groups.head.elements > 0), whole, groups.layers)

    def use(self, each: Pass, parts: Sequence[ShardGroup], whole: int, behind: int) -> None:
        """Gather groups one after another, with which so many bytes are whole; so many layers were used before."""
        each.live["buffers_secondary"] = self.secondary(
            each.groups.embedding.padded + behind * each.groups.layer.padded
        )
        if not self.reshards and not each.gathers:
            return
        whole -= sum(map(self.whole, parts))
        for group in parts:
            each.live["buffers_whole"] = whole
            flat_before = each.live.get("buffers_flat", 0)
            self.gather(each, group)
            whole += self.whole(group)
            self.copy_out(each, group, whole, flat_before)

    def end_forward(self, each: Pass) -> None:
        """Free the last flat tensor and what is gathered again for backward."""
        each.drop("buffers_flat")
        if self.reshards:
            each.drop("buffers_whole", "buffers_root")
            each.live["buffers_secondary"] = self.secondary(each.groups.padded)

    def enter_backward(self, each: Pass) -> None:
        """Gather the root or the head, and the last layer in advance."""
        if self.reshards:
            root, head, parts = each.groups.root, each.groups.head, self.layout.secondary_shards
            self.gather(each, root if root.elements else head, parts)
            each.put(buffers_root=self.whole(root), buffers_whole=self.whole(head))
            each.live["buffers_secondary"] -= self.secondary(root.padded + head.padded)
            each.drop("buffers_flat")
            self.gather(each, each.groups.rest, parts)

    def head_gradient(self, each: Pass) -> None:
        """Keep the head's gradient until its group is reduced."""
        each.live["temporaries_head"] = self.vocabulary_grad_bytes

    def leave_head(self, each: Pass) -> None:
        """Reduce the head's group; the gradient of the root's matrix waits for the end."""
        each.drop("temporaries_head")
        if each.groups.head.elements:
            each.live["activations"] = each.activations.before_backward - sum(each.activations.norm.values())
            self.reshard(each, 0)
            self.reduce(each, each.trained.head)
        else:
            each.live["buffers_waiting"] = each.trained.waiting * self.precision.compute_bytes

    def enter_layer(self, each: Pass, following: int) -> None:
        """Copy a layer out of its flat tensor, and gather in advance its experts or else the layer before it."""
        super().enter_layer(each, following)
        self.reshard(each, following)
        if self.reshards:
            self.copy_out(each, each.groups.rest, self.whole(each.groups.rest))
            self.gather_ahead(each, following, each.groups.experts)

    def gather_ahead(self, each: Pass, following: int, experts: ShardGroup | None = None) -> None:
        """Gather what backward uses next in the place of the flat tensor that was copied out."""
        groups = each.groups
        before = each.trained.embedding if following == groups.layers - 1 else groups.rest
        ahead = (groups.layers - 1 - following) * groups.layer.padded
        each.live["buffers_secondary"] = self.secondary(groups.embedding.padded + ahead)
        each.drop("buffers_flat")
        self.gather(each, experts if experts and experts.elements else before, self.layout.secondary_shards)

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Keep the gradients of a layer, in the width of compute; those of experts of their own are reduced first.

        A second forward copies experts out of their flat tensor and keeps that until they are computed, as a first one
        does. The layer before is gathered in advance when their own backward begins.
        """
        experts = each.trained.experts
        if experts.elements and moment.experts == "left":
            each.live["buffers_whole"] -= self.whole(experts) * (self.reshards or each.is_last)
            self.reduce(each, experts)
            each.live["gradients"] = self.computed(each, following, experts.at_rest)
        elif experts.elements and self.reshards and moment.experts:
            if each.live["buffers_whole"] < self.whole(each.groups.layer):
                self.copy_out(each, each.groups.experts, self.whole(each.groups.layer))
            if moment.experts == "entered":
                self.gather_ahead(each, following)
        own = moment.weights + moment.computed - experts.elements * (moment.weights >= experts.elements)
        each.put(buffers_gradients=own * self.shape.width)

    def leave_layer(self, each: Pass, following: int) -> None:
        """Free and reduce a layer."""
        self.reshard(each, following + 1)
        self.reduce(each, each.trained.rest)

    def collect(self, each: Pass) -> None:
        """Reduce each group in the order of modules, the first layer for all, beside the gradients behind it."""
        groups, width = each.trained, self.precision.compute_bytes
        behind = groups.elements
        for group, count in ((groups.root, 1), (groups.layer, groups.layers), (groups.head, 1)):
            each.live["temporaries"] = (behind - group.elements) * width
            self.reduce(each, group)
            behind -= count * group.elements

    def end(self, each: Pass) -> None:
        """Compute the embedding's gradient, and reduce the last group. A tied matrix has two, and their sum."""
        groups, last = each.trained, each.trained.last_reduced
        each.drop("buffers_flat", "buffers_waiting")
        if each.activations.stage.holds_embedding:
            elements = groups.embedding.elements + groups.root.elements + 2 * groups.waiting
            computed, gradients = self.computed(each, groups.layers), elements * self.precision.compute_bytes
            if self.reshards:
                each.live |= {"buffers_whole": self.whole(groups.embedding), "buffers_secondary": 0}
            each.put(gradients=computed, buffers_gradients=gradients, temporaries=self.shape.whole_hidden_bytes)
        if self.reshards or each.is_last:
            each.drop("buffers_whole")
        # The shard becomes the gradient itself in the first micro-batch.
        shard = -(self.reduced(last) // self.degree) * each.is_first
        each.live |= {"temporaries": 0, "buffers_root": 0, "gradients": each.new_gradients, "buffers_shard": shard}
        self.reduce(each, last)
