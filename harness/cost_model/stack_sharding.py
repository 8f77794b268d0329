"""What another implementation allocates in a step and keeps for backward, as its stack describes it. Imports no torch.

The tensors that a layer keeps are those of Korthikanti et al. (arXiv 2205.05198, section 4.1): two norms, four
projections of attention, an MLP and the dropout masks, as harness.cost_model.activations has them for this project's
own layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from harness.config.schema import RunConfig
from harness.config.stack import StackMemory
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape
from harness.cost_model.optimizer_state import OptimizerTensor
from harness.cost_model.pipeline import BackwardStart
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.stage_activations import LayerActivations, StageActivations
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
        parts = shards if is_flat else 1  # of parameters and gradients
        self.memory = memory
        self.main_width = precision.accumulate_bytes * (memory.keeps_main_gradients and not is_flat)
        width = precision.master_bytes if is_flat else precision.compute_bytes
        widths = StateWidths(
            width,
            width,
            self.main_width or width,
            precision.master_bytes * (precision.is_mixed and not is_flat),
            gathered=precision.compute_bytes * (is_flat and (shards > 1 or precision.is_mixed)),
        )
        super().__init__(config, layout, widths, "cuda", stages)
        self.shard_counts |= {"optimizer": shards, "parameters": parts, "gradients": parts}
        self.activations = [StackActivations(self.shape, stage, config.checkpointing, memory) for stage in stages]

    @cached_property
    def updated(self) -> Sequence[OptimizerTensor]:
        """The tensors that the rank's optimizer updates: one flat tensor."""
        return (OptimizerTensor(sum(self.counts) / self.shard_counts["optimizer"]),)

    @property
    def update_bytes(self) -> int:
        """The bytes of the optimizer's copies of its state."""
        return self.memory.optimizer_copies * self.precision.master_bytes * math.ceil(self.updated[0].elements)

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

    def gathered_bytes(self, each: Pass, in_use: int) -> int:
        """Return the bytes of gathered parameters: all, or those outside of layers and of so many layers in use."""
        groups, is_whole = each.groups, self.layout.zero_stage == 2 or self.shard_counts["parameters"] == 1
        units = groups.layers if is_whole else min(groups.layers, in_use)
        return self.widths.gathered * (groups.elements - (groups.layers - units) * groups.layer.elements)

    def counted_starts(self, starts: Sequence[BackwardStart]) -> Sequence[BackwardStart]:
        """Return the start of the backward in a pipeline that is the first to find most passes kept."""
        if not self.layout.pp_enabled or not starts:
            return starts
        return [max(starts, key=lambda start: sum(start.pending))]

    def played_layers(self, layers: int) -> Sequence[int]:
        """Return the last layer alone, which finds most activations."""
        return range(min(1, layers))

    def begin(self, each: Pass) -> None:
        """Gather parameters, and inputs in buffers that sequence parallelism has for them."""
        inputs = self.memory.tp_gather_buffers * self.shape.whole_hidden_bytes * self.shape.sequence_parallel
        each.live |= {"buffers_gathered": self.gathered_bytes(each, 0), "temporaries_inputs": inputs}

    def enter_backward(self, each: Pass) -> None:
        """Receive the gradient of the pass's output."""
        each.live["temporaries_received"] = self.shape.hidden_bytes * self.layout.pp_enabled

    def head_gradient(self, each: Pass) -> None:
        """Count no gradient of the head, which is less than the loss."""

    def enter_layer(self, each: Pass, following: int) -> None:
        """Gather the layers in use; a layer's gradients are whole before they are reduced."""
        gathered, reduced = self.gathered_bytes(each, 1 + self.memory.prefetched_units), each.groups.layer.elements
        each.live |= {"buffers_gathered": gathered, "buffers_reduced": self.reduced_bytes(reduced)}

    def in_layer(self, each: Pass, following: int, moment: LayerMoment) -> None:
        """Compute the layer's gradients."""
        each.put()

    def end(self, each: Pass) -> None:
        """Reduce the gradients outside of layers, beside that of the largest matrix.

        Those of all of a rank's stages may exist before they are added to sums.
        """
        first, layer = self.groups[0], each.groups.layer.elements
        root = first.elements - first.layers * first.layer.elements
        largest_grad = self.shape.width * max(root * self.stages[0].holds_embedding, layer // 2)
        gradients = max(each.new_gradients, sum(self.gradients) - sum(self.sums))
        each.put(gradients=gradients, buffers_reduced=self.reduced_bytes(root), temporaries=largest_grad)

    def reduced_bytes(self, elements: int) -> int:
        """Return the bytes of so many gradients before they are reduced, where parameters are gathered."""
        return self.precision.compute_bytes * elements * (self.widths.gathered > 0)

    def step(self, tape: Tape) -> None:
        """Run the optimizer."""
        tape.touch(gradients=sum(self.sums), temporaries=self.update_bytes)


@dataclass(frozen=True, eq=False)
class StackActivations(StageActivations):
    """The bytes that a pass through a stage keeps, without what is sent and received, which stacks count as data."""

    memory: StackMemory

    input_bytes = output_bytes = 0  # what is sent and received is freed
    logits_bytes = 0  # beside what the loss has
    table_bytes = 0  # all passes share one

    def of_layer(self, is_recomputed: bool) -> LayerActivations:
        """Return what a layer keeps, and the one moment of its backward that counts."""
        whole, scores, backward = layer_bytes(self.shape, self.memory)
        saved = whole
        if self.checkpointing.name == "attention":
            saved = whole - scores
        elif is_recomputed:
            saved = self.shape.hidden_bytes
        return LayerActivations(saved, 0, 0, (LayerMoment(saved, whole - saved + backward),))

    @cached_property
    def norm(self) -> dict[str, int]:
        """The bytes that the final norm keeps."""
        return {"norm": norm_bytes(self.shape, self.memory)} if self.stage.holds_head else {}

    @cached_property
    def loss_bytes(self) -> int:
        """The bytes of logits at the worst moment of the loss."""
        shape, memory = self.shape, self.memory
        tokens = min(shape.tokens, memory.loss_chunk_tokens or shape.tokens)
        elements = tokens * (shape.model.vocab_size // shape.vocabulary_tp) * self.stage.holds_head
        return elements * (memory.fp32_logits * FP32_BYTES + memory.narrow_logits * shape.width)


@lru_cache(maxsize=4096)
def layer_bytes(shape: MicroBatchShape, memory: StackMemory) -> tuple[int, int, int]:
    """Return the bytes that a layer keeps for backward and, of these, what eager attention keeps of its scores.

    The third number is the gradients of intermediates at the worst moment of backward.
    """
    model = shape.model
    norms, gated = norm_bytes(shape, memory) * 2, model.architecture.has_gate
    rows, is_flash = shape.tokens * model.num_attention_heads // shape.tp, model.attention == "flash"
    heads = (2 + memory.attention_copies) * shape.query_bytes + 2 * shape.key_bytes + rows * FP32_BYTES * is_flash
    # The softmax, and with dropout its mask and result.
    width = memory.scores_bytes + (1 + shape.width if model.dropout else 0)
    scores = rows * shape.seq_len * width * (not is_flash)
    inner = shape.inner_bytes * (memory.gated_mlp_tensors if gated else memory.plain_mlp_tensors)
    # The gradient of the MLP's output, gathered where it is divided, and of the tensors between its matrices.
    backward = shape.hidden_bytes + shape.inner_bytes * (2 if gated else 1)
    backward += shape.whole_hidden_bytes if shape.sequence_parallel and shape.tp > 1 else 0
    return norms + heads + scores + inner + 2 * shape.dropout_mask_bytes, scores, backward


def norm_bytes(shape: MicroBatchShape, memory: StackMemory) -> int:
    """Return the bytes that one norm keeps: its input, statistics in fp32 and its output, which matrices take."""
    is_rms = shape.model.architecture.norm == "rms"
    inputs = shape.hidden_bytes * (1 + (memory.rms_norm_copies if is_rms else 0))
    statistics = shape.residual_tokens * FP32_BYTES * (1 if is_rms else 2)
    return inputs + statistics + (shape.hidden_bytes if memory.gathers_inputs_again else shape.whole_hidden_bytes)
