"""What ways of sharding model state allocate in a step, at the moments of a pass that play_pass() calls. No torch.

Each class is a policy of one library, and its methods are the steps of that library which allocate or free. This module
has those of ranks that keep all of their state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.config.adapter import NF4_BYTES
from harness.config.schema import Device, RunConfig
from harness.cost_model.communication import tied_bytes
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.micro_batch_shape import FP32_BYTES, micro_batch_shape
from harness.cost_model.optimizer_state import OptimizerTensor, optimizer_tensors, state_bytes, update_temporaries
from harness.cost_model.pipeline import BackwardStart, PassKind
from harness.cost_model.quantized import quantized_base
from harness.cost_model.shard_groups import ShardGroups, local_parameter_count, shard_groups
from harness.cost_model.stage_activations import StageActivations, stage_activations
from harness.cost_model.tape import Tape
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_sizes
from harness.layout.state_widths import STATE_KINDS, StateKind, StateWidths


@dataclass
class Pass(Tape):
    """A micro-batch's pass through a stage: its allocations, and its place among those of its step."""

    activations: StageActivations
    groups: ShardGroups
    trained: ShardGroups  # the same without frozen parameters
    kind: PassKind
    is_first: bool  # whether no earlier micro-batch has left gradients in the stage
    gathers: bool  # whether its forward is the only one of the stage so far
    is_last: bool  # whether its backward is the stage's last one of the step
    new_gradients: int = 0  # the bytes of the gradients that it allocates; 0 if it adds to those of an earlier pass

    @cached_property
    def most_saved(self) -> int:
        """The most bytes that it keeps for its backward at once, with log-probabilities."""
        logits = self.activations.logits_bytes
        return max(
            moment.live.get("activations", 0) + logits * (moment.live.get("loss", 0) > 0) for moment in self.moments
        )


class Sharding:
    """Ranks that keep their whole state, and reduce gradients where they lie."""

    reduces_groups = False  # whether gradients are reduced to shards group by group
    has_host_part = False  # whether offloaded gradients are apart from the device's all the time, on a CPU too

    def __init__(
        self, config: RunConfig, layout: Layout, widths: StateWidths, device: Device, stages: Sequence[Stage]
    ) -> None:
        self.config, self.layout, self.widths, self.stages = config, layout, widths, stages
        self.precision, self.is_mixed, self.is_cpu = config.precision, config.precision.is_mixed, device == "cpu"
        self.device = device
        self.offloads, self.degree = layout.offload != "none", layout.axes_size(layout.sharding_axes)
        # Whether autograd adds one gradient of a matrix to another, as it does with those that DeepSpeed's own linear
        # function returns. Those of torch's are views, which it leaves as they are.
        self.sums_in_place = widths.recomputes_last_projection
        self.is_tied = config.model.tie_word_embeddings and not layout.pp_enabled
        self.shape = micro_batch_shape(config, layout, device)
        self.activations = [stage_activations(self.shape, stage, config.checkpointing) for stage in stages]
        self.even_sizes = local_sizes(config.model, layout, stages, trained=True)  # of parameters, each an even share
        self.groups = [shard_groups(config.model, layout, stage) for stage in stages]
        self.trained = [shard_groups(config.model, layout, stage, trained=True) for stage in stages]
        self.shard_counts = {kind: layout.shard_count(kind) for kind in STATE_KINDS}
        self.micro_batches = layout.grad_accumulation_steps(config.train)

    # The rank's state.

    @cached_property
    def counts(self) -> list[int]:
        """The elements of each stage's parameters."""
        return self.counts_of("parameters")

    def counts_of(self, kind: StateKind) -> list[int]:
        """Return the elements of each stage's state of a kind, before data-parallel shards divide it."""
        cut = self.layout.tp, self.layout.vocabulary_tp, self.layout.undivided_ep(kind)
        trained = kind != "parameters"
        return [local_parameter_count(self.config.model, stage, *cut, trained) for stage in self.stages]

    def shards(self, width: int, kind: StateKind) -> list[int]:
        """Return the bytes of the rank's shard of each stage's state of a kind."""
        return [-(-width * count // self.shard_counts[kind]) for count in self.counts_of(kind)]

    @cached_property
    def parameter_bytes(self) -> int:
        """The bytes of the rank's parameters between steps; every rank has all scales of quantized ones."""
        widths, (quantized, scales) = self.widths, quantized_base(self.config.model, self.stages)
        trained = sum(self.counts_of("gradients")) if self.config.model.adapter.is_enabled else sum(self.counts)
        size = widths.parameters * trained + widths.frozen * (sum(self.counts) - trained)
        size -= math.floor((widths.frozen - NF4_BYTES) * quantized)
        return -(-size // self.shard_counts["parameters"]) + scales

    @cached_property
    def optimizer_bytes(self) -> int:
        """The bytes of the rank's optimizer state."""
        elements = math.ceil(sum(tensor.elements for tensor in self.updated))
        return self.widths.masters * elements + state_bytes(*self.update)

    @cached_property
    def updated(self) -> Sequence[OptimizerTensor]:
        """The tensors that the rank's optimizer updates."""
        return optimizer_tensors(self.config.model, self.layout, self.stages)

    @property
    def update(self) -> tuple[str, Sequence[OptimizerTensor], str]:
        """The optimizer, what it updates, and the dtype of masters."""
        return self.config.optimizer.name, self.updated, self.precision.master

    @cached_property
    def host_gradients(self) -> list[int]:
        """The bytes of each stage's offloaded gradients: those that the optimizer reads, divided as its state is."""
        return self.shards(self.widths.host_gradients, "optimizer")

    @cached_property
    def gradients(self) -> list[int]:
        """The most bytes of each stage's gradients on the device; on a CPU the host's memory is the device's."""
        own, has_both = self.shards(self.widths.gradients, "gradients"), self.is_cpu and not self.has_host_part
        return [sum(sizes) for sizes in zip(own, self.host_gradients, strict=True)] if has_both else own

    @cached_property
    def host_gradient_bytes(self) -> int:
        """The bytes of gradients that a CPU, where the host is the device, has all the time."""
        return sum(self.host_gradients) * (self.is_cpu and self.has_host_part)

    @cached_property
    def sums(self) -> list[int]:
        """The bytes of each stage's gradients that are kept from one micro-batch to the next."""
        return self.gradients

    @property
    def keeps_gradients(self) -> bool:
        """Whether the memory of gradients is still allocated when a step begins."""
        return self.layout.dp_enabled

    @cached_property
    def gradients_at_start(self) -> list[int]:
        """The bytes of each stage's gradients that exist when a step begins."""
        return [size * self.keeps_gradients for size in self.sums]

    def gradients_after(self, index: int, backwards: int) -> int:
        """Return the bytes of a stage's gradients between two passes, after so many backwards of a step."""
        return self.sums[index] if backwards else self.gradients_at_start[index]

    @cached_property
    def buffer_bytes(self) -> int:
        """The bytes of the buffers that live through a step.

        torch's stages receive every micro-batch of a step, and every gradient, into a buffer of its own.
        """
        received = sum(stage.input_bytes + stage.output_bytes for stage in self.activations)
        host = self.widths.host_buffer_bytes if self.is_cpu else 0
        return self.micro_batches * received + self.widths.buffer_bytes + host

    @property
    def has_16_bit_grads(self) -> bool:
        """Whether backward computes gradients in 16 bit, and each is added to an fp32 sum at once."""
        return self.is_mixed

    def kept_bytes(self, index: int, has_forwards: bool, has_gradients: bool) -> int:
        """Return the buffers that a stage keeps between two of its passes of a step."""
        return 0

    def counted_starts(self, starts: Sequence[BackwardStart]) -> Sequence[BackwardStart]:
        """Return those starts of backwards among which the worst moment of a step is looked for."""
        return starts

    # The moments of a pass, in their order.

    def played_layers(self, layers: int) -> Sequence[int]:
        """Return which layers' backwards are played, by the number of layers behind each.

        They are the last, the one before it and the first: from one layer to the next, all changes by the same bytes.
        """
        return sorted({*range(min(2, layers)), *range(layers)[-1:]})

    def begin(self, each: Pass) -> None:
        """Prepare a pass."""

    def forward(self, each: Pass, following: int) -> None:
        """Make the parameters of a layer whole, which so many others follow."""

    def forward_head(self, each: Pass) -> None:
        """Make the parameters of the head whole."""

    def end_forward(self, each: Pass) -> None:
        """Free what forward alone needs."""

    def enter_backward(self, each: Pass) -> None:
        """Make parameters whole that backward needs first."""

    def head_gradient(self, each: Pass) -> None:
        """Accumulate the head's gradient: it becomes the parameter's own, or is added to it.

        That of a tied matrix waits for the embedding's.
        """
        matrix = self.vocabulary_grad_bytes
        added = matrix if self.is_tied else self.grad_accumulate_bytes
        accumulated = matrix * self.has_16_bit_grads if self.is_new(each) else added
        each.put(gradients=self.computed(each, 0), temporaries=self.shape.whole_hidden_bytes + accumulated)
        each.live["temporaries_waiting"] = matrix * self.is_tied

    def leave_head(self, each: Pass) -> None:
        """Reduce the head's gradient."""

    def enter_layer(self, each: Pass, following: int) -> None:
        """Make the parameters of a layer whole."""
        each.live["gradients"] = self.computed(each, following)

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Compute a gradient of the layer's weights, or accumulate it.

        A gradient in fp32 becomes the parameter's own. One in 16 bit is added to it, or widened to become it.
        """
        own = moment.weights + moment.computed * (moment.is_accumulation or not self.has_16_bit_grads)
        computed = moment.computed * self.shape.width
        if each.new_gradients and not self.has_16_bit_grads:
            computed = 0
        elif moment.is_accumulation and self.has_16_bit_grads and self.is_cpu and not each.new_gradients:
            computed += moment.computed * FP32_BYTES  # a CPU widens it first
        each.put(gradients=self.computed(each, following, own), temporaries_weight=computed)

    def leave_layer(self, each: Pass, following: int) -> None:
        """Reduce the gradients of a layer."""
        each.drop("temporaries_weight")

    def collect(self, each: Pass) -> None:
        """Reduce the gradients of a backward for weights alone."""

    def end(self, each: Pass) -> None:
        """Compute the embedding's gradient, and let it become the parameter's.

        A tied matrix has two gradients, whose sum is made beside them unless one is added to the other.
        """
        new, shape = each.new_gradients, self.shape
        if not each.activations.stage.holds_embedding:
            each.put(gradients=new)
            return
        matrix, tied = self.vocabulary_grad_bytes, self.vocabulary_grad_bytes * self.is_tied
        computed = max(matrix + tied + shape.whole_hidden_bytes, (3 - self.sums_in_place) * tied)
        if not self.is_new(each):
            each.put(gradients=new, temporaries=max(computed, self.grad_accumulate_bytes))
        elif self.has_16_bit_grads:
            each.put(gradients=new - matrix * FP32_BYTES // shape.width, temporaries=computed)
            each.put(gradients=new, temporaries=matrix)
        else:  # the gradient becomes the parameter's own
            each.put(gradients=new, temporaries=computed - matrix)

    # The moments of a step outside of passes.

    def step(self, tape: Tape) -> None:
        """Receive the gradient of a tied table from the other end of the pipeline, and run the optimizer."""
        received = round(sum(tied_bytes(self.config, self.layout, stage, None) for stage in self.stages))
        tape.touch(gradients=sum(self.gradients), temporaries=max(received, self.update_bytes))

    @property
    def update_bytes(self) -> int:
        """The bytes of the temporaries of the optimizer's update."""
        return update_temporaries(*self.update, self.config.train.fused_optimizer, self.device)

    # Gradients of matrices.

    @cached_property
    def vocabulary_grad_bytes(self) -> int:
        """Bytes of the gradient of embedding or head, the largest matrices, as backward computes it; 0 if frozen."""
        rows = math.ceil(self.config.model.vocab_size / self.layout.vocabulary_tp)
        return rows * self.config.model.hidden_size * self.shape.width * (not self.config.model.adapter.is_enabled)

    @cached_property
    def grad_accumulate_bytes(self) -> int:
        """Bytes of the largest matrix's gradient while it is added to an earlier sum; a CPU widens it first."""
        widened = FP32_BYTES * (self.has_16_bit_grads and self.is_cpu)
        return self.vocabulary_grad_bytes * (self.shape.width + widened) // self.shape.width

    def is_new(self, each: Pass) -> bool:
        """Return whether a pass allocates gradients of embedding and head."""
        return each.new_gradients > 0

    def computed(self, each: Pass, following: int, own: int = 0) -> int:
        """Return how many bytes of a pass's new gradients exist when backward has left so many layers behind.

        Of the next layer it has computed those of `own` elements. That of tied matrices is complete only when backward
        ends. Where data-parallel shards divide gradients, a group's share is that of its elements with padding.
        """
        groups = each.trained
        head = groups.head.at_rest
        if groups.root.elements and each.activations.stage.holds_head and not self.is_tied:
            head = 0 if self.reduces_groups else groups.root.at_rest
        return round(each.new_gradients * (head + following * groups.layer.at_rest + own) / groups.at_rest)
