"""What would make a prediction that does not fit one that does. Imports no torch."""

import dataclasses
from collections.abc import Iterator

from harness.config.schema import RunConfig
from harness.cost_model.fits import Choices, Variant, remedies
from harness.cost_model.prediction import Prediction
from harness.layout.layout import Layout, resolve_layout
from harness.planner.plan_problems import plan_problems, predict
from harness.runner.resolve import load_precision_preset, load_strategy_preset
from harness.util.errors import UserError


def offers(prediction: Prediction) -> Iterator[str]:
    """Yield what would make a prediction that does not fit one that does, each as what to type."""
    config, layout, cluster, stack = prediction.config, prediction.layout, prediction.cluster, prediction.stack

    def plan_variant(changed: RunConfig, world_size: int | None) -> Variant | None:
        """Return the changed configuration as the cluster, or more nodes of it, would run it."""
        ranks = world_size or layout.world_size
        try:
            strategy = changed.strategy
            other = wider_layout(layout, ranks) if strategy == config.strategy else resolve_layout(strategy, ranks)
            wider = cluster.with_ranks(ranks)
            if other is None or any(plan_problems(changed, other, wider, stack)):
                return None
        except UserError:
            return None
        planned = predict(changed, other, wider, stack)
        return Variant(other, planned.memory, planned.room)

    choices = Choices(
        plan_variant,
        prediction.memory.process_bytes,
        sharded=(load_strategy_preset("fsdp_full_shard"),),
        precisions=tuple(map(load_precision_preset, ("bf16_mixed", "bf16"))),
        offloads=cluster.device == "cuda",
    )
    yield from remedies(config, layout, choices)


def wider_layout(layout: Layout, ranks: int) -> Layout | None:
    """Return the same layout over more data-parallel ranks; None if they do not divide evenly."""
    factor, rest = divmod(ranks, layout.world_size)
    if rest:
        return None
    axis = "dp_shard" if layout.dp_shard > 1 or layout.data_parallel != "ddp" else "dp_replicate"
    return dataclasses.replace(layout, **{axis: getattr(layout, axis) * factor})
