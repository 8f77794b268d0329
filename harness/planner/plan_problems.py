"""The rules of a run that hold on the cluster of a plan, without a machine at hand."""

from collections.abc import Iterator
from functools import cache

from harness.config.schema import RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.prediction import Prediction
from harness.cost_model.stack_memory import require_expressible
from harness.engines.base import EngineModule, load_engine, unsupported_elsewhere
from harness.hardware.described_cluster import DescribedCluster, described_machine
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from harness.util.errors import UserError


def plan_problems(config: RunConfig, layout: Layout, cluster: DescribedCluster, stack: StackConfig) -> Iterator[str]:
    """Yield every reason why a configuration cannot run as this layout on this cluster, a line each.

    They are those of a run but for what depends on the machine at hand. The rules of an engine are those of the stack
    `harness` alone; another stack has its own.
    """
    yield from incompatibilities(config, layout)
    problem = cluster.world_size_problem(layout.world_size)
    if problem:
        yield problem
    yield from described_machine(cluster).world_size_problems(layout.world_size)
    if stack.memory.kind != "harness":
        try:
            require_expressible(config, layout, stack)
        except UserError as error:
            yield str(error)
        return
    yield from unsupported_elsewhere(engine_module(layout.engine), config, layout, described_machine(cluster))


@cache
def engine_module(name: str) -> EngineModule:
    """Return an engine's module, which is looked for once."""
    return load_engine(name)


def predict(config: RunConfig, layout: Layout, cluster: DescribedCluster, stack: StackConfig) -> Prediction:
    """Return the prediction of a layout with what its engine allocates."""
    return Prediction(config, layout, cluster, stack, engine_module(layout.engine).state_widths)
