"""What keeps a layout from a cluster that need not be at hand, and what would make one fit there. Imports no torch."""

import dataclasses
from collections.abc import Iterator
from functools import cache

from harness.config.schema import RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.fits import Choices, Variant, remedies
from harness.cost_model.prediction import Prediction
from harness.cost_model.stack_memory import stack_problems
from harness.engines.base import load_engine, unsupported_elsewhere
from harness.hardware.described_cluster import DescribedCluster, described_machine
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout, resolve_layout
from harness.runner.resolve import load_precision_preset, load_strategy_preset
from harness.util.errors import UserError

engine_module = cache(load_engine)  # a search asks for few of them often


def plan_problems(prediction: Prediction) -> Iterator[str]:
    """Yield every reason why a configuration cannot run as its layout on its cluster, a line each.

    They are those of a run but for what depends on the machine at hand. The rules of an engine are those of the stack
    `harness` alone; another stack has its own.
    """
    config, layout, cluster, stack = prediction.config, prediction.layout, prediction.cluster, prediction.stack
    yield from incompatibilities(config, layout)
    problem = cluster.world_size_problem(layout.world_size)
    if problem:
        yield problem
    yield from described_machine(cluster).world_size_problems(layout.world_size)
    if prediction.is_runnable:
        yield from unsupported_elsewhere(engine_module(layout.engine), config, layout, described_machine(cluster))
    else:
        yield from stack_problems(config, layout, stack)


def predict(config: RunConfig, layout: Layout, cluster: DescribedCluster, stack: StackConfig) -> Prediction:
    """Return the prediction of a layout with what its engine allocates."""
    return Prediction(config, layout, cluster, stack, engine_module(layout.engine).state_widths)


def offers(prediction: Prediction) -> Iterator[str]:
    """Yield what would make a prediction that does not fit one that does, each as what to type."""
    config, layout, cluster, stack = prediction.config, prediction.layout, prediction.cluster, prediction.stack
    axis = "dp_shard" if layout.dp_shard > 1 or layout.data_parallel != "ddp" else "dp_replicate"

    def plan_variant(changed: RunConfig, world_size: int | None) -> Variant | None:
        """Return the changed configuration as the cluster, or more nodes of it, would run it."""
        ranks = world_size or layout.world_size  # a multiple of the layout's
        wider = dataclasses.replace(layout, **{axis: getattr(layout, axis) * ranks // layout.world_size})
        try:
            other = wider if changed.strategy == config.strategy else resolve_layout(changed.strategy, ranks)
            planned = predict(changed, other, cluster.with_ranks(ranks), stack)
            return None if any(plan_problems(planned)) else Variant(other, planned.memory, planned.room)
        except UserError:
            return None

    choices = Choices(
        plan_variant,
        prediction.memory.process_bytes,
        sharded=(load_strategy_preset("fsdp_full_shard"),),
        precisions=tuple(map(load_precision_preset, ("bf16_mixed", "bf16"))),
        offloads=cluster.device == "cuda",
    )
    yield from remedies(config, layout, choices)
