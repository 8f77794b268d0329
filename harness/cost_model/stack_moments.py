"""The moments of a step at which a rank's activations, loss or gradients are largest. Imports no torch.

They are the end of the last forward, with the loss, the entry of backward into the last layer, and the end of a
backward; between the last two, both activations and gradients change by the same bytes from layer to layer.
"""

from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.config.stack_memory import StackMemory
from harness.cost_model.stack_activations import PassShape, head_bytes, layer_bytes, loss_bytes
from harness.cost_model.stack_parameters import RankParts
from harness.cost_model.stack_state import Moment
from harness.layout.layout import Layout

INT64_BYTES = 8


@lru_cache(maxsize=4096)
def pass_shape(
    model: ModelConfig, tokens: int, seq_len: int, width: int, tp: int, vocabulary_tp: int, sequence_parallel: bool
) -> PassShape:
    """Return one shape for all equal ones, so that caches compare it by identity first."""
    return PassShape(model, tokens, seq_len, width, tp, vocabulary_tp, sequence_parallel)


def activation_moments(
    config: RunConfig,
    layout: Layout,
    memory: StackMemory,
    parts: RankParts,
    shape: PassShape,
    pp_rank: int,
    micro_batches: int,
) -> list[Moment]:
    """Return the moments of the backward that finds most micro-batches kept."""
    layer = layer_bytes(shape, memory)
    saved, again, recomputes = layer.saved, 0, 0
    if config.checkpointing.name == "attention":
        saved, again = layer.saved - layer.scores, layer.scores
    elif config.checkpointing.name != "none":
        recomputes = sum(config.checkpointing.recomputes_layer(index) for index in range(sum(parts.chunks)))
        again = layer.saved - shape.hidden_bytes if recomputes else 0
    layers = sum(parts.chunks)
    average = (saved * (layers - recomputes) + shape.hidden_bytes * recomputes) / max(1, layers)
    passes = passes_in_flight(layout, micro_batches, pp_rank)
    group = layout.micro_batches_per_round(micro_batches)
    ends = embedding_bytes(config, shape) if parts.holds_embedding else 0
    pending = round(average * layers_in_flight(parts.chunks, passes, group)) + ends * -(-passes // len(parts.chunks))
    pass_bytes = round(average * parts.chunks[-1]) + (ends if len(parts.chunks) == 1 else 0)
    received = shape.hidden_bytes if layout.pp > 1 else 0
    moments = []
    loss = 0
    if parts.holds_head:
        head, loss = head_bytes(shape, memory), loss_bytes(shape, memory)
        moments.append(Moment(pending + head, loss, 0, layers))
    gathers = memory.tp_gather_buffers * shape.whole_hidden_bytes if shape.sequence_parallel else 0
    moments.append(Moment(pending, 0, again + layer.backward + received, layers, True))
    largest = shape.width * max(parts.root if parts.holds_embedding else 0, parts.unit // 2)
    moments.append(Moment(max(0, pending - pass_bytes), 0, largest + received, 0, True))
    if not gathers:
        return moments
    return [Moment(m.activations, m.loss, m.temporaries + gathers, m.remaining_layers, m.in_backward) for m in moments]


def embedding_bytes(config: RunConfig, shape: PassShape) -> int:
    """Return what the embedding keeps of a pass: token ids, and the mask of its dropout."""
    masks = shape.residual_tokens * config.model.hidden_size if config.model.dropout else 0
    return shape.tokens * INT64_BYTES + masks


def passes_in_flight(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Return the most passes through a rank's stages that it keeps for backward at once.

    1F1B keeps as many as there are stages from this one on, GPipe all, and the interleaved schedule its warm-up and one
    more (Megatron-LM, megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    chunks, stages = layout.virtual_stages, layout.pp
    if layout.schedule == "gpipe" and layout.pp_enabled:
        return micro_batches
    if chunks == 1:
        return min(micro_batches, stages - pp_rank)
    warm_up = (chunks - 1) * layout.micro_batches_per_round(micro_batches) + 2 * (stages - 1 - pp_rank)
    return min(chunks * micro_batches, warm_up + 1)


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
