"""The state of a rank under another implementation, and the moments of a step at which its bytes are most. No torch.

The moments are the end of the last forward, with the loss, the entry of backward into the last layer, and the end of a
backward; between the last two, both activations and gradients change by the same bytes from layer to layer. The tensors
that a layer keeps are those of Korthikanti et al. (arXiv 2205.05198, section 4.1): two norms, four projections of
attention, an MLP and the dropout masks, as harness.cost_model.activations has them for this project's own layers.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

from harness.config.schema import RunConfig
from harness.config.stack import StackMemory
from harness.config.strategy import Schedule
from harness.cost_model.micro_batch_shape import FP32_BYTES, INT64_BYTES, MicroBatchShape
from harness.cost_model.pipeline import max_in_flight_micro_batches
from harness.cost_model.stack_parameters import RankParts
from harness.cost_model.tape import Bytes, Tape
from harness.layout.layout import Layout, micro_batches_per_round


@dataclass(frozen=True)
class StackState:
    """The model state of one rank, at rest and in the moments of a step."""

    parameters: int
    optimizer: int
    gradients: int  # of all parameters, where no buffer of them lives from step to step, or beside it
    at_rest: int  # gradients and buffers that are allocated between steps
    layers: int
    optimizer_temporaries: int
    main_gradients: int = 0  # a buffer that lives from step to step
    buckets: int = 0  # that live from step to step
    unit_gathered: int = 0  # of one layer's parameters as they are gathered for use
    root_gathered: int = 0  # of all others
    gathered_units: int = 0  # how many layers are gathered at once; all of them under ZeRO stage 2
    unit_gradient: int = 0  # of one layer's gradients before they are reduced
    root_gradient: int = 0

    def at(self, remaining_layers: int, in_backward: bool, accumulates: bool) -> Bytes:
        """Return the bytes of gradients and buffers in the last micro-batch of a step.

        `remaining_layers` are those of its pass whose backward has not run.
        """
        left = remaining_layers / self.layers if self.layers else 0.0  # a stage may have the head alone
        # Between forward and backward, layers that are gathered for each use are freed.
        units = self.gathered_units if in_backward or self.gathered_units == self.layers else 0
        gathered = self.root_gathered + self.unit_gathered * min(units, self.layers)
        reduced = 0
        if self.unit_gathered and in_backward:
            reduced = self.unit_gradient if remaining_layers else self.root_gradient
        share = 1 - left if in_backward and not accumulates else float(accumulates)
        if self.main_gradients:  # gradients of a backward are added to the buffer at its end
            share = 1 - left if in_backward else 0.0
        gradients = self.main_gradients + round(self.gradients * share)
        return {"gradients": gradients, "buffers": self.buckets + gathered + reduced}

    def in_optimizer_step(self) -> Bytes:
        """Return the bytes of all parts but resident ones in the optimizer's step, where activations are gone."""
        gradients = self.main_gradients or self.gradients
        return {"gradients": gradients, "buffers": self.buckets, "temporaries": self.optimizer_temporaries}


def model_state(config: RunConfig, layout: Layout, memory: StackMemory, parts: RankParts) -> StackState:
    """Return a rank's model state: widths from the precision, shards from ZeRO's stage (arXiv 1910.02054)."""
    precision, count, layers = config.precision, parts.parameters, sum(parts.chunks)
    compute, master, states = precision.compute_bytes, precision.master_bytes, config.optimizer_state_bytes
    shards = layout.dp_shard * (layout.cp if layout.zero_stage else 1)
    if memory.kind == "flat_units":
        is_sharded = layout.data_parallel == "fsdp" and layout.zero_stage > 0 and shards > 1
        degree = shards if is_sharded else 1
        gathered = compute if is_sharded or precision.is_mixed else 0
        gradients = -(-master * count // degree)
        return StackState(
            parameters=gradients,
            optimizer=-(-states * count // degree),
            gradients=gradients,
            at_rest=gradients if memory.keeps_gradients_at_rest and is_sharded else 0,
            layers=layers,
            optimizer_temporaries=-(-memory.optimizer_copies * master * count // degree),
            unit_gathered=gathered * parts.unit,
            root_gathered=gathered * parts.root,
            gathered_units=layers if layout.zero_stage == 2 or not is_sharded else 1 + memory.prefetched_units,
            unit_gradient=compute * parts.unit,
            root_gradient=compute * parts.root,
        )
    degree = shards if layout.zero_stage >= 1 else 1
    main = precision.accumulate_bytes * count if memory.keeps_main_gradients else 0
    buckets = memory.reduce_bucket_bytes * count if layout.dp > 1 and layout.zero_stage == 0 else 0
    return StackState(
        parameters=compute * count,
        optimizer=-(-(states + master * precision.is_mixed) * count // degree),
        gradients=compute * count if memory.holds_backward_gradients or not main else 0,
        at_rest=main + buckets,
        layers=layers,
        optimizer_temporaries=-(-memory.optimizer_copies * master * count // degree),
        main_gradients=main,
        buckets=buckets,
    )


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of one layer's tensors for one micro-batch."""

    saved: int  # for backward
    scores: int  # of these, what eager attention keeps of its scores
    backward: int  # gradients of intermediates at the worst moment of backward


@lru_cache(maxsize=4096)
def layer_bytes(shape: MicroBatchShape, memory: StackMemory) -> LayerBytes:
    """Return what a layer keeps for backward and what its backward adds at its worst moment."""
    model = shape.model
    norms, gated = norm_bytes(shape, memory) * 2, model.architecture.has_gate
    heads, scores = (2 + memory.attention_copies) * shape.query_bytes + 2 * shape.key_bytes, 0
    rows = shape.tokens * model.num_attention_heads // shape.tp
    if model.attention == "flash":
        heads += rows * FP32_BYTES
    else:  # the softmax, and with dropout its mask and result
        scores = rows * shape.seq_len * (memory.scores_bytes + (1 + shape.width if model.dropout else 0))
    inner = shape.inner_bytes * (memory.gated_mlp_tensors if gated else memory.plain_mlp_tensors)
    masks = 2 * shape.residual_tokens * model.hidden_size if model.dropout else 0
    # The gradient of the MLP's output, gathered where it is divided, and of the tensors between its matrices.
    backward = shape.hidden_bytes + shape.inner_bytes * (2 if gated else 1)
    backward += shape.whole_hidden_bytes if shape.sequence_parallel and shape.tp > 1 else 0
    return LayerBytes(norms + heads + scores + inner + masks, scores, backward)


def norm_bytes(shape: MicroBatchShape, memory: StackMemory) -> int:
    """Return the bytes that one norm keeps: its input, statistics in fp32 and its output, which matrices take."""
    is_rms = shape.model.architecture.norm == "rms"
    inputs = shape.hidden_bytes * (1 + (memory.rms_norm_copies if is_rms else 0))
    statistics = shape.residual_tokens * FP32_BYTES * (1 if is_rms else 2)
    return inputs + statistics + (shape.hidden_bytes if memory.gathers_inputs_again else shape.whole_hidden_bytes)


def stack_loss_bytes(shape: MicroBatchShape, memory: StackMemory) -> int:
    """Return the bytes of logits at the worst moment of the loss."""
    tokens = min(shape.tokens, memory.loss_chunk_tokens or shape.tokens)
    rows = math.ceil(shape.model.vocab_size / (memory.vocabulary_multiple * shape.vocabulary_tp))
    elements = tokens * rows * memory.vocabulary_multiple
    return elements * (memory.fp32_logits * FP32_BYTES + memory.narrow_logits * shape.width)


def play_stack(
    config: RunConfig,
    layout: Layout,
    memory: StackMemory,
    parts: RankParts,
    shape: MicroBatchShape,
    state: StackState,
    pp_rank: int,
) -> Tape:
    """Return the tape of the backward that finds most micro-batches kept, and of the optimizer's step."""
    micro_batches = layout.grad_accumulation_steps(config.train)
    layer = layer_bytes(shape, memory)
    saved, again, recomputes = layer.saved, 0, 0
    if config.checkpointing.name == "attention":
        saved, again = layer.saved - layer.scores, layer.scores
    elif config.checkpointing.name != "none":
        recomputes = sum(config.checkpointing.recomputes_layer(index) for index in range(sum(parts.chunks)))
        again = layer.saved - shape.hidden_bytes if recomputes else 0
    layers = sum(parts.chunks)
    average = (saved * (layers - recomputes) + shape.hidden_bytes * recomputes) / max(1, layers)
    passes = micro_batches  # of GPipe; no stack has a schedule that splits backward
    if layout.schedule != "gpipe" or not layout.pp_enabled:
        schedule: Schedule = "interleaved_1f1b" if layout.virtual_stages > 1 else "1f1b"
        passes = max_in_flight_micro_batches(dataclasses.replace(layout, schedule=schedule), micro_batches, pp_rank)
    group = micro_batches_per_round(layout.pp, micro_batches)
    ends = 0  # token ids, and the mask of the embedding's dropout
    if parts.holds_embedding:
        masks = shape.residual_tokens * config.model.hidden_size if config.model.dropout else 0
        ends = shape.tokens * INT64_BYTES + masks
    pending = round(average * layers_in_flight(parts.chunks, passes, group)) + ends * -(-passes // len(parts.chunks))
    pass_bytes = round(average * parts.chunks[-1]) + (ends if len(parts.chunks) == 1 else 0)
    received = shape.hidden_bytes if layout.pp > 1 else 0
    gathers = memory.tp_gather_buffers * shape.whole_hidden_bytes if shape.sequence_parallel else 0
    tape, accumulates = Tape(), micro_batches > 1
    if parts.holds_head:
        tape.live = state.at(layers, in_backward=False, accumulates=accumulates)
        activations, loss = pending + norm_bytes(shape, memory), stack_loss_bytes(shape, memory)
        tape.put(activations=activations, loss=loss, temporaries=gathers)
    tape.phase = "backward"
    tape.live = state.at(layers, in_backward=True, accumulates=accumulates)
    tape.put(activations=pending, temporaries=again + layer.backward + received + gathers)
    largest = shape.width * max(parts.root if parts.holds_embedding else 0, parts.unit // 2)
    tape.live = state.at(0, in_backward=True, accumulates=accumulates)
    tape.put(activations=max(0, pending - pass_bytes), temporaries=largest + received + gathers)
    tape.phase = "optimizer"
    tape.live = {}
    tape.put(**state.in_optimizer_step())
    return tape


def layers_in_flight(chunks: tuple[int, ...], passes: int, group: int) -> int:
    """Return the layers of so many passes, which go through a rank's stages in groups of micro-batches."""
    if len(chunks) == 1:
        return passes * chunks[0]
    whole, rest = divmod(passes, group * len(chunks))
    layers = whole * group * sum(chunks)
    for chunk in chunks:
        layers += chunk * min(rest, group)
        rest = max(0, rest - group)
    return layers
