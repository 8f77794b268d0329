"""The bytes that ranks which divide the experts send each other, by how many rows go to whose experts. No torch."""

from collections.abc import Callable

from harness.config.schema import RunConfig
from harness.cost_model.micro_batch_shape import INT64_BYTES, MicroBatchShape
from harness.layout.layout import Layout
from harness.layout.partition import Stage

# How many rows of tokens a rank sends to others' experts, and receives for its own, in all micro-batches, by layer.
RoutedRows = Callable[[int], tuple[float, float]]


def balanced_rows(rows: int, experts: int, ranks: int) -> list[int]:
    """Return how many of a rank's rows go to the experts of every rank if each expert in turn gets one."""
    even, left = divmod(rows, experts)
    part = experts // ranks
    return [even * part + min(part, max(0, left - rank * part)) for rank in range(ranks)]


def balanced_routing(config: RunConfig, layout: Layout, rank: int, shape: MicroBatchShape) -> RoutedRows:
    """Return the rows that a rank sends and receives in every layer if every rank has balanced_rows()."""
    rows = balanced_rows(shape.routed_rows, config.model.num_experts, layout.ep) if layout.ep_enabled else [0]
    own = rows.pop(layout.coordinates(rank)["ep"])
    micro_batches = layout.grad_accumulation_steps(config.train)
    sent, received = micro_batches * sum(rows), micro_batches * own * len(rows)
    return lambda _: (sent, received)


def ep_bytes(
    config: RunConfig, layout: Layout, stage: Stage, shape: MicroBatchShape, routed: RoutedRows
) -> dict[str, float]:
    """Return the bytes that a rank sends along the expert-parallel axis for a stage.

    A row of hidden states and its weight go to the rank that has the expert, and the output comes back; gradients go
    the opposite ways (GShard, arXiv 2006.16668, has two all-to-alls in forward, and as many in backward). Before, ranks
    exchange how many rows each expert has. A second forward repeats forward's. `routed` is that of expected_bytes().
    """
    if not layout.ep_enabled:
        return {}
    hidden, experts = config.model.hidden_size, config.model.num_experts
    counted = layout.grad_accumulation_steps(config.train) * experts * INT64_BYTES
    total = 0.0
    for index in stage.layer_indices:
        sent, received = routed(index)
        forward = (sent * (hidden + 1) + received * hidden) * shape.width + counted * (layout.ep - 1) / layout.ep
        backward = (sent * hidden + received * (hidden + 1)) * shape.width
        total += forward * (1 + config.checkpointing.recomputes_layer(index)) + backward
    return {"ep all_to_all": total}
