"""The bytes that one rank must send in a step under ring algorithms: as the papers count them, and exactly."""

import math
from collections import defaultdict

from harness.config.schema import RunConfig
from harness.cost_model.dp_communication import dp_bytes
from harness.cost_model.expert_communication import RoutedRows, balanced_routing, ep_bytes
from harness.cost_model.flops import recomputed_layers
from harness.cost_model.micro_batch_shape import MicroBatchShape, micro_batch_shape
from harness.cost_model.ring import ring_fraction
from harness.cost_model.tp_communication import tp_bytes
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel, local_shapes, stages_of_rank
from harness.layout.state_widths import StateWidths


def expected_bytes(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    rank: int,
    *,
    is_padded: bool = False,
    is_sent: bool = False,
    routed: RoutedRows | None = None,
) -> dict[str, float]:
    """Return the bytes that this rank must send in a step by the papers, in which every share is even.

    The keys are an axis, or several joined by '+', and a kind: gather or reduce along the axes of data and sequences
    (`dp_shard gather`), the operation along the others (`tp all_reduce`). Gradient norms and flags are left out. With
    `is_padded` shares are uneven, and padded as the library does it. With `is_sent` gradients count twice where a
    library all-reduces what the papers reduce once. `routed` returns how many rows of tokens the rank sends to others'
    experts, and receives for its own, in the layer of an index in all micro-batches; by default they are
    balanced_rows().
    """
    expected: defaultdict[str, float] = defaultdict(float)
    shape = micro_batch_shape(config, layout, "cpu")  # what is sent is the same on every device
    routed = routed or balanced_routing(config, layout, rank, shape)
    passes = 1 + (is_sent and widths.all_reduces_gradients)
    for stage in stages_of_rank(config.model, layout, rank):
        # Every micro-batch's hidden states go to the next stage in forward, and their gradient to the one before in
        # backward. Tensor-parallel ranks all send all of them; with sequence parallelism each sends its part.
        neighbors = (not stage.holds_head) + (not stage.holds_embedding) - abs(stage.local_neighbor)
        transfers = neighbors * layout.grad_accumulation_steps(config.train) * shape.hidden_bytes
        for sent in (
            *(
                dp_bytes(config, layout, widths, stage, rank if is_padded else None, passes, of_experts)
                for of_experts in ((False, True) if layout.ep_enabled else (None,))
            ),
            ep_bytes(config, layout, stage, shape, routed),
            tp_bytes(config, layout, stage, shape, widths.tp_allreduces_per_layer),
            cp_bytes(config, layout, stage, shape),
            {"pp send": transfers + tied_bytes(config, layout, stage, rank if is_padded else None)},
        ):
            for name, size in sent.items():
                expected[name] += size  # shards of fully_shard may lie along cp, too
    return dict(expected)


def tied_bytes(config: RunConfig, layout: Layout, stage: Stage, rank: int | None) -> float:
    """Return the bytes of its shard of a tied table's gradient that an end of a pipeline sends to the other end.

    Shards are equal runs of rows, the last ones shorter; without a rank they are an even share.
    """
    if not config.model.tie_word_embeddings or stage.holds_embedding == stage.holds_head:
        return 0.0
    table, shards = "embed_tokens.weight", layout.shard_count("gradients")
    if rank is None:
        return local_numel(config.model, layout, stage)[table] / shards * config.precision.accumulate_bytes
    rows, width = local_shapes(config.model, layout, stage, rank)[table]
    part, index = math.ceil(rows / shards), layout.shard_index(rank) if shards > 1 else 0
    return float(min(part, max(0, rows - index * part)) * width * config.precision.accumulate_bytes)


def cp_bytes(config: RunConfig, layout: Layout, stage: Stage, shape: MicroBatchShape) -> dict[str, float]:
    """Return the bytes that a rank sends along the context-parallel axis for a stage: keys, values, their gradients.

    There is an all-gather in forward, another in a second forward of layer or attention, and a reduce-scatter in
    backward (Llama 3, arXiv 2407.21783, section 3.3.2). Ranks that exchange heads send queries and outputs as well
    (Ulysses, arXiv 2309.14509, section 3.2); a second forward of attention alone stops before its output is sent.
    """
    if not layout.cp_enabled:
        return {}
    sent, recomputed = 2 * shape.core_key_bytes, recomputed_layers(config, layout, stage)
    one_pass = ring_fraction(layout.cp) * layout.grad_accumulation_steps(config.train)
    if layout.exchanges_heads:
        outputs = 2 * stage.layers + recomputed * (config.checkpointing.name != "attention")
        queries_and_keys = (2 * stage.layers + recomputed) * (shape.query_bytes + sent)
        return {"cp all_to_all": one_pass * (queries_and_keys + outputs * shape.query_bytes)}
    return {"cp gather": one_pass * (stage.layers + recomputed) * sent, "cp reduce": one_pass * stage.layers * sent}
