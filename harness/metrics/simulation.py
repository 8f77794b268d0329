"""The columns of a simulated run's row, from the reports of the ranks that were simulated."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.cost_model.flops import model_flops
from harness.layout.layout import Layout
from harness.metrics.columns import communication_bytes
from harness.metrics.kernels import kernel_columns
from harness.metrics.memory import max_known, memory_columns
from harness.metrics.throughput import executed_flops
from harness.records.rank_report import RankReport
from harness.records.schema import Cells


def simulated_columns(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return memory, bytes and operations; operations are those of all ranks, where every stage was simulated."""
    executed = executed_flops(ranks) if len(ranks) == layout.pp else None
    return {
        **memory_columns(ranks),
        **kernel_columns(config, ranks),
        "communication_bytes": communication_bytes(ranks),
        "max_in_flight_micro_batches": max_known(rank.profiled.max_in_flight_micro_batches for rank in ranks),
        "model_flops": model_flops(config),
        "executed_flops": None if executed is None else executed * (layout.world_size // layout.pp),
    }
