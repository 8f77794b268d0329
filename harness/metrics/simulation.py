"""The columns of a simulated run's row, from the reports of the ranks that were simulated."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.cost_model.flops import model_flops
from harness.cost_model.parts import STEP_PARTS
from harness.cost_model.timing.kernels import device_peak_flops
from harness.cost_model.timing.step_time import StepTime
from harness.layout.layout import Layout
from harness.metrics.columns import communication_bytes, executed_flops, kernel_columns
from harness.metrics.disturbance import disturbance_text
from harness.metrics.memory import max_known, memory_columns
from harness.metrics.step_time import (
    COPYING,
    EXPOSED,
    IDLE,
    PHASE_COLUMNS,
    median_step_seconds,
    step_seconds,
    step_time_columns,
)
from harness.records.rank_report import RankReport, SimulatedTime
from harness.records.schema import Cells


def simulated_columns(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return memory, bytes, operations and time; operations are those of all ranks, if every stage was simulated."""
    executed = executed_flops(ranks) if len(ranks) == layout.pp else None
    return {
        **memory_columns(ranks),
        **kernel_columns(config, ranks),
        "communication_bytes": communication_bytes(ranks),
        "max_in_flight_micro_batches": max_known(rank.profiled.max_in_flight_micro_batches for rank in ranks),
        "model_flops": model_flops(config),
        "executed_flops": None if executed is None else executed * (layout.world_size // layout.pp),
        **simulated_time_columns(config, layout, ranks),
    }


def simulated_time_columns(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return the step of the slowest rank, its parts, which add up to it, and the throughput of the world.

    The time between the host's launches and what a pipeline stage waits for others is idle. There are none of these
    columns where the cluster's hardware is not described.
    """
    slowest = slowest_simulated_time(ranks)
    if slowest is None:
        return {}
    parts = dict.fromkeys(STEP_PARTS, 0.0)
    for phase, seconds in slowest.phase_seconds.items():
        parts[PHASE_COLUMNS[phase]] += seconds
    parts |= {EXPOSED: sum(slowest.exposed_seconds.values()), COPYING: slowest.copy_seconds, IDLE: slowest.idle_seconds}
    tokens, needed = config.train.global_batch * config.train.seq_len, model_flops(config)
    hardware = config.cluster.hardware
    peak = None if hardware is None else device_peak_flops(hardware, config.precision.compute)
    per_device = 1 / slowest.step_seconds / layout.world_size
    return {
        "step_seconds": slowest.step_seconds,
        **parts,
        "overlapped_communication_seconds": slowest.overlapped_seconds,
        "tokens_per_second": tokens / slowest.step_seconds,
        "tokens_per_second_per_device": tokens * per_device,
        "model_flops_per_second_per_device": needed * per_device,
        "mfu": needed * per_device / peak if peak else None,
    }


def slowest_simulated_time(ranks: Sequence[RankReport]) -> SimulatedTime | None:
    """Return the time of the slowest simulated rank, of equally slow ones the busiest; None unless all have a time."""
    times = [rank.simulated_time for rank in ranks if rank.simulated_time is not None]
    if not times or len(times) < len(ranks):
        return None
    return max(times, key=lambda time: (time.step_seconds, -time.idle_seconds))


# The parts of a step that mean the same in a virtual run as in a real one.
MEASURED = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")


def virtual_columns(layout: Layout, ranks: Sequence[RankReport], predicted: StepTime | None) -> Cells:
    """Return the times of the ranks that ran alone, and the step time with the communication that is predicted.

    A virtual run has no step_seconds and no throughput, as it did not run the whole step. What its stand-ins for
    collectives took is left out. `predicted` is None where the hardware is not known.
    """
    measured = step_time_columns(layout, ranks)
    stand_ins = measured[EXPOSED]  # None where the steps were not traced
    columns: Cells = {name: measured[name] for name in MEASURED}
    columns |= {
        "skipped_steps": max(rank.skipped_steps for rank in ranks),
        "noise_warning": disturbance_text(step_seconds(ranks), [rank.host_usage for rank in ranks]),
    }
    if predicted is None:
        return columns
    communication = sum(predicted.exposed_communication_seconds.values()) + predicted.bubble_seconds
    alone = median_step_seconds(ranks) - (stand_ins if isinstance(stand_ins, float) else 0.0)
    return columns | {
        "predicted_communication_seconds": communication,
        "estimated_step_seconds": alone + communication,
    }
