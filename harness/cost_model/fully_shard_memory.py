"""The memory that fully_shard takes for whole parameters and for gradients on their way to shards. Imports no torch.

The order of its allocations is that of torch.distributed.fsdp._fully_shard (_fsdp_param_group.py and
_fsdp_collectives.py). A group's parameters are gathered into a flat tensor and copied out of it, and in backward each
group gathers the one before it in advance. A group's whole gradients are copied to a flat tensor, which is reduced to a
shard, and which lives until the next group's gradients are copied, even in the next micro-batch.
"""

from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import Pass, ShardGroup, ShardGroups, TransientBuffers, shard_groups
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


@dataclass(frozen=True)
class GroupBytes:
    """The bytes of groups on their way through fully_shard, by the widths of an element."""

    gathered: int
    gradient: int
    wire: int  # of what is reduced
    shards: int
    casts: bool  # whether shards are cast to the gathered width before they are sent
    is_cpu: bool  # where gradients that do not divide evenly are padded in copies, and gloo copies what it transfers

    def whole(self, group: ShardGroup) -> int:
        """Return the bytes of the gathered parameters."""
        return group.padded * self.gathered

    def flat(self, group: ShardGroup) -> int:
        """Return the bytes of the flat tensor that is the result of a gather; a single shard needs none."""
        return self.whole(group) * (self.shards > 1)

    def gather(self, group: ShardGroup) -> int:
        """Return the bytes while the group is gathered into its flat tensor."""
        flat = self.flat(group)
        return flat + flat // self.shards * self.casts + flat * self.is_cpu

    def reduced(self, group: ShardGroup) -> int:
        """Return the bytes of the flat tensor of gradients."""
        return group.padded * self.wire

    def shard(self, group: ShardGroup) -> int:
        """Return the bytes of the result of a reduction."""
        return self.reduced(group) // self.shards

    def reduction(self, group: ShardGroup) -> int:
        """Return the most bytes while a group's gradients are reduced, its result included.

        At first all of its gradients lie beside the flat tensor. When that is reduced, a loop in foreach_reduce still
        refers to the last of them.
        """
        flat = self.reduced(group)
        copied_in = group.elements * self.gradient + flat + group.uneven * self.gradient * self.is_cpu
        last = group.last * self.gradient * (self.shards > 1)
        copy = flat * (self.is_cpu and self.shards > 1)
        return max(copied_in, flat + self.shard(group) + last + copy)


def fully_shard_buffers(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    device: Device,
    moment: Pass,
) -> TransientBuffers:
    """Return the buffers of a micro-batch's pass through a stage that fully_shard shards.

    Where parameters stay whole (zero_stage 0 and 2), the first forward of a step gathers them, and its last backward
    frees each group as it goes.
    """
    groups = shard_groups(config.model, layout, stage)
    shards, precision = layout.axes_size(layout.sharding_axes), config.precision
    sizes = GroupBytes(
        widths.gathered,
        precision.compute_bytes,
        precision.reduce_bytes,
        shards,
        casts=precision.is_mixed and shards > 1,
        is_cpu=device == "cpu",
    )
    return (resharded_buffers if layout.zero_stage == 3 else whole_buffers)(groups, sizes, moment)


def resharded_buffers(groups: ShardGroups, sizes: GroupBytes, moment: Pass) -> TransientBuffers:
    """Return the buffers of groups that are gathered for forward and again for backward."""
    root, embedding, layer, head = groups.root, groups.embedding, groups.layer, groups.head
    retained = 0 if moment.is_first else sizes.reduced(groups.last_reduced)
    whole_root, indices = sizes.whole(root), observed_layers(groups.layers)
    waiting = whole_root + groups.waiting * sizes.gradient

    def gathered_ahead(following: int) -> ShardGroup:
        return layer if following < groups.layers - 1 else embedding

    def reduced_before(following: int) -> int:
        return sizes.reduced(layer) if following else sizes.reduced(head) or retained

    def entered(following: int) -> int:
        ahead = max(sizes.flat(layer), sizes.gather(gathered_ahead(following)))
        return waiting + sizes.whole(layer) + ahead + reduced_before(following)

    def in_layer(following: int) -> int:
        return waiting + sizes.whole(layer) + sizes.flat(gathered_ahead(following)) + reduced_before(following)

    def reduction(following: int) -> int:
        return waiting + sizes.flat(gathered_ahead(following)) + sizes.reduction(layer)

    in_forward = [sizes.whole(layer) + sizes.flat(layer)]
    in_forward += [sizes.whole(head) + sizes.flat(head), sizes.flat(layer) + sizes.gather(head)]
    behind = root if root.elements else head  # the group that backward enters first
    entering = (
        sizes.gather(behind),
        sizes.flat(behind) + sizes.whole(behind),
        sizes.whole(behind) + sizes.gather(layer),
    )
    return TransientBuffers(
        forward=whole_root + retained + max(in_forward),
        last_layer=whole_root + retained + groups_before_last_layer(groups, sizes) + sizes.gather(layer),
        loss=retained,
        entering=retained + max(entering),
        head=retained + sizes.whole(behind) + sizes.flat(layer),
        head_reduction=sizes.flat(layer) + sizes.reduction(head) if head.elements else 0,
        entered=tuple(map(entered, indices)),
        layers=tuple(map(in_layer, indices)),
        reductions=tuple(map(reduction, indices)),
        last_gradient=whole_root + sizes.whole(embedding) + last_gradient_bytes(groups, sizes),
        end=sizes.reduction(groups.last_reduced) - sizes.shard(groups.last_reduced) * moment.is_first,
    )


def whole_buffers(groups: ShardGroups, sizes: GroupBytes, moment: Pass) -> TransientBuffers:
    """Return the buffers of groups that stay whole from the first forward of a step to its last backward."""
    layer, head, last = groups.layer, groups.head, groups.last_reduced
    retained = 0 if moment.is_first else sizes.reduced(last)
    whole, frees, indices = groups.padded * sizes.gathered, moment.is_last, observed_layers(groups.layers)
    waiting = groups.waiting * sizes.gradient

    def left(following: int) -> int:
        """Return the bytes of parameters once backward has left the head and so many layers."""
        return whole - (sizes.whole(head) + following * sizes.whole(layer)) * frees

    def in_layer(following: int) -> int:
        before = sizes.reduced(layer) if following else sizes.reduced(head) or retained
        return left(following) + waiting + before

    def reduction(following: int) -> int:
        return left(following + 1) + waiting + sizes.reduction(layer)

    # The step's first forward gathers, and the flat tensor of one group stays while the next one is gathered.
    in_head = (sizes.flat(head), sizes.flat(layer) + sizes.gather(head) - sizes.whole(head))
    gathered = max(*in_head, sizes.flat(layer) - sizes.whole(head)) * moment.gathers
    in_last_layer = groups_before_last_layer(groups, sizes) + sizes.gather(layer) - sizes.whole(layer)
    return TransientBuffers(
        forward=whole + max(retained, gathered),
        last_layer=(whole - sizes.whole(head) + in_last_layer) * moment.gathers,
        loss=whole + retained,
        entering=whole + retained,
        head=whole + retained,
        head_reduction=left(0) + sizes.reduction(head) if head.elements else 0,
        layers=tuple(map(in_layer, indices)),
        reductions=tuple(map(reduction, indices)),
        last_gradient=left(groups.layers) + last_gradient_bytes(groups, sizes),
        end=(0 if frees else whole) + sizes.reduction(last) - sizes.shard(last) * moment.is_first,
    )


def groups_before_last_layer(groups: ShardGroups, sizes: GroupBytes) -> int:
    """Return the bytes of the flat tensor of the group that forward gathers before the last layer."""
    first = groups.root if groups.root.elements else groups.embedding
    return sizes.flat(groups.layer if groups.layers > 1 else first)


def last_gradient_bytes(groups: ShardGroups, sizes: GroupBytes) -> int:
    """Return the bytes of gradients when backward computes the embedding's: those, and the reduced one before it.

    A tied matrix has two gradients, whose sum is made beside them.
    """
    elements = groups.embedding.elements + groups.root.elements + 2 * groups.waiting
    return elements * sizes.gradient + sizes.reduced(groups.layer)
