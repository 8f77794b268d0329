"""What another implementation allocates in a step, as its stack describes it. Imports no torch."""

from collections.abc import Sequence
from functools import cached_property

from harness.config.schema import RunConfig
from harness.config.stack import StackMemory
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.pipeline import BackwardStart
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.stack_activations import StackActivations
from harness.cost_model.tape import Tape
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


class StackSharding(Sharding):
    """Weights that are whole beside whole or sharded optimizer state, or FSDP1's flat parameters of each layer.

    A flat parameter is sharded at rest, cast to the width of compute and gathered for use. Between forward and
    backward, layers that are gathered for each use are freed. A step has few moments here: at the loss, when backward
    enters a layer, at the end of a backward, and in the step of the optimizer.
    """

    vocabulary_grad_bytes = 0  # the loss is all that counts at the head

    def __init__(self, config: RunConfig, layout: Layout, memory: StackMemory, stages: Sequence[Stage]) -> None:
        precision, is_flat = config.precision, memory.kind == "flat_units"
        is_sharded = layout.zero_stage > 0 and (layout.data_parallel == "fsdp" or not is_flat)
        shards = layout.dp_shard * layout.cp if is_sharded else 1
        self.memory = memory
        self.shard_counts = {"optimizer": shards, "parameters": shards if is_flat else 1}
        self.main_width = precision.accumulate_bytes * (memory.keeps_main_gradients and not is_flat)
        width = precision.master_bytes if is_flat else precision.compute_bytes
        masters = precision.master_bytes * (precision.is_mixed and not is_flat)
        gathered = precision.compute_bytes * (is_flat and (shards > 1 or precision.is_mixed))
        widths = StateWidths(width, self.main_width or width, config.optimizer_state_bytes + masters, gathered)
        super().__init__(config, layout, widths, "cuda", stages)
        self.optimizer_copies = memory.optimizer_copies
        self.activations = [StackActivations(self.shape, stage, config.checkpointing, memory) for stage in stages]

    def shard_count(self, kind: str) -> int:
        """Return the number of shards of a kind of state; gradients are sharded as parameters are."""
        return self.shard_counts.get(kind, self.shard_counts["parameters"])

    @cached_property
    def optimizer_bytes(self) -> int:
        """The bytes of the rank's optimizer state."""
        return -(-self.widths.optimizer * sum(self.counts) // self.shard_count("optimizer"))

    @cached_property
    def sums(self) -> list[int]:
        """The bytes of each stage's gradients that are kept from one micro-batch to the next."""
        return self.shards(self.widths.gradients, "gradients")

    @cached_property
    def gradients(self) -> list[int]:
        """The most bytes of each stage's gradients: those of a backward may exist before they are added to sums."""
        added = self.precision.compute_bytes * (self.memory.holds_backward_gradients and self.main_width > 0)
        return [size + added * count for size, count in zip(self.sums, self.counts, strict=True)]

    @property
    def keeps_gradients(self) -> bool:
        """Whether a buffer of gradients lives from step to step."""
        return self.main_width > 0

    @cached_property
    def buffer_bytes(self) -> int:
        """The bytes of the buckets in which replicas without a sharded optimizer reduce gradients."""
        has_buckets = self.layout.dp_enabled and self.layout.zero_stage == 0
        return self.memory.reduce_bucket_bytes * sum(self.counts) * has_buckets

    def gathered_bytes(self, each: Pass, *, in_backward: bool) -> int:
        """Return the bytes of gathered parameters: all, or those outside of layers and of layers in use."""
        groups, units = each.groups, each.groups.layers
        if self.layout.zero_stage != 2 and self.shard_count("parameters") > 1:
            units = min(units, 1 + self.memory.prefetched_units) * in_backward
        return self.widths.gathered * (groups.elements - (groups.layers - units) * groups.layer.elements)

    def counted_starts(self, starts: Sequence[BackwardStart]) -> Sequence[BackwardStart]:
        """Return the start of the backward in a pipeline that is the first to find most passes kept."""
        if not self.layout.pp_enabled or not starts:
            return starts
        return [max(starts, key=lambda start: sum(start.pending))]

    def played_layers(self, layers: int) -> Sequence[int]:
        """Return the last layer alone, which finds most activations."""
        return range(min(1, layers))

    def begin(self, tape: Tape, each: Pass) -> None:
        """Gather parameters, and inputs in buffers that sequence parallelism has for them."""
        tape.live["buffers_gathered"] = self.gathered_bytes(each, in_backward=False)
        inputs = self.memory.tp_gather_buffers * self.shape.whole_hidden_bytes * self.shape.sequence_parallel
        tape.live["temporaries_inputs"] = inputs

    def enter_backward(self, tape: Tape, each: Pass) -> None:
        """Receive the gradient of the pass's output."""
        tape.live["temporaries_received"] = self.shape.hidden_bytes * self.layout.pp_enabled

    def head_gradient(self, tape: Tape, each: Pass) -> None:
        """Count no gradient of the head, which is less than the loss."""

    def enter_layer(self, tape: Tape, each: Pass, following: int) -> None:
        """Gather the layers in use; a layer's gradients are whole before they are reduced."""
        tape.live["buffers_gathered"] = self.gathered_bytes(each, in_backward=True)
        tape.live["buffers_reduced"] = self.reduced_bytes(each.groups.layer.elements)

    def in_layer(self, tape: Tape, each: Pass, following: int, moment: LayerMoment) -> None:
        """Compute the layer's gradients."""
        tape.put()

    def end(self, tape: Tape, each: Pass) -> None:
        """Reduce the gradients outside of layers, beside that of the largest matrix.

        Those of all of a rank's stages may exist before they are added to sums.
        """
        first, layer = self.groups[0], each.groups.layer.elements
        root = first.elements - first.layers * first.layer.elements
        largest = max(root * self.stages[0].holds_embedding, layer // 2)
        gradients = max(each.new_gradients, sum(self.gradients) - sum(self.sums))
        tape.live |= {"gradients": gradients, "buffers_reduced": self.reduced_bytes(root)}
        tape.put(temporaries=self.shape.width * largest)

    def reduced_bytes(self, elements: int) -> int:
        """Return the bytes of so many gradients before they are reduced, where parameters are gathered."""
        return self.precision.compute_bytes * elements * (self.widths.gathered > 0)

    def step(self, tape: Tape) -> None:
        """Run the optimizer."""
        tape.touch(gradients=sum(self.sums), temporaries=self.foreach_bytes)
