"""The measured columns of a finished run's row, of a simulated one's too, and the entries of its steps.

And the bytes that a rank sends by operation and mesh axis, beside those of the layout's formula and of other senders.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS, RunConfig
from harness.cost_model.flops import model_flops
from harness.cost_model.parts import STEP_PARTS
from harness.cost_model.ring import LAYOUT
from harness.cost_model.timing.kernels import device_peak_flops
from harness.cost_model.timing.step_time import StepTime
from harness.hardware.machine import peak_flops
from harness.layout.layout import Layout
from harness.layout.rank_groups import group_axes
from harness.metrics.costs import checkpoint_columns, cost_per_billion_tokens, start_up_columns
from harness.metrics.memory import max_known, memory_columns, peak_rank
from harness.metrics.step_time import (
    COPYING,
    EXPOSED,
    IDLE,
    PHASE_COLUMNS,
    bubble_columns,
    disturbance_text,
    median_step_seconds,
    step_seconds,
    step_time_columns,
)
from harness.records.rank_report import COMPOSED, RankReport, SimulatedTime
from harness.records.schema import Cells
from harness.util.files import JsonObject

# The parts of a step that mean the same in a virtual run as in a real one.
MEASURED = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")


def measured_columns(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return the measured columns. Memory is the maximum over ranks; a step takes as long as its slowest rank.

    Processor seconds and energy are those of all ranks.
    """
    usages, losses = [rank.host_usage for rank in ranks], mean_losses(ranks)
    energies = [usage.energy_joules for usage in usages if usage.energy_joules is not None]
    tokens = config.train.steps * config.train.global_batch * config.train.seq_len
    return {
        **throughput_columns(config, ranks, median_step_seconds(ranks)),
        **step_time_columns(layout, ranks),
        **memory_columns(ranks),
        "cpu_seconds": sum(usage.cpu_seconds for usage in usages) / config.train.steps,
        "peak_rss_bytes": max_known(usage.peak_rss_bytes for usage in usages),
        "joules_per_token": sum(energies) / tokens if len(energies) == len(usages) else None,
        "attention_kernel": "+".join(attention_kernels(config, ranks)) or None,
        "noise_warning": disturbance_text(step_seconds(ranks), usages),
        "communication_bytes": communication_bytes(ranks),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "expert_load": expert_load(ranks),
        "skipped_steps": max(rank.skipped_steps for rank in ranks),
        "max_in_flight_micro_batches": max_known(rank.profiled.max_in_flight_micro_batches for rank in ranks),
        "measured_on": peak_rank(ranks).device_name,
        **bubble_columns(config, layout, ranks),
        **start_up_columns(config, ranks),
        **checkpoint_columns(ranks),
    }


def expert_load(ranks: Sequence[RankReport]) -> float | None:
    """Return the tokens of the busiest expert of any layer over the mean of its layer's experts; None without experts.

    Ranks that divide a layer's matrices have the same tokens, which does not change the ratio.
    """
    by_layer: dict[int, list[int]] = {}
    for rank in ranks:
        for layer, counts in rank.expert_tokens:
            by_layer[layer] = [a + b for a, b in zip(by_layer.get(layer, [0] * len(counts)), counts, strict=True)]
    return max((max(counts) * len(counts) / sum(counts) for counts in by_layer.values()), default=None)


def communication_bytes(ranks: Sequence[RankReport]) -> int | None:
    """Return the most that any rank must send in one step; None where a process drives several devices itself."""
    return round(max(map(sent_bytes, ranks))) if all(rank.devices == 1 for rank in ranks) else None


def step_entries(config: RunConfig, ranks: Sequence[RankReport]) -> list[JsonObject]:
    """Return one entry per step for steps.jsonl: the world's mean loss, the gradient norm, the slowest rank's time."""
    losses, norms = mean_losses(ranks), ranks[0].grad_norms
    seconds, phases = step_seconds(ranks), step_phases(config)
    times = [None] * config.train.warmup_steps + seconds + [None] * (TRACED_STEPS + PROFILED_STEPS)
    return [
        {"step": step, "phase": phase, "loss": loss, "grad_norm": norm, "seconds": time}
        for step, (phase, loss, norm, time) in enumerate(zip(phases, losses, norms, times, strict=True))
    ]


def step_phases(config: RunConfig) -> list[str]:
    """Return the phase of the run that each step belongs to, in order."""
    counts = {
        "warm-up": config.train.warmup_steps,
        "timed": config.train.steps,
        "profiled": PROFILED_STEPS,
        "traced": TRACED_STEPS,
    }
    return [phase for phase, steps in counts.items() for _ in range(steps)]


def mean_losses(ranks: Sequence[RankReport]) -> list[float | None]:
    """Return the mean loss of every step over the ranks; None where a rank's loss is not finite."""
    steps = zip(*(rank.losses for rank in ranks), strict=True)
    return [None if None in losses else sum(loss or 0.0 for loss in losses) / len(losses) for losses in steps]


def attention_kernels(config: RunConfig, ranks: Sequence[RankReport]) -> list[str]:
    """Return the attention kernels that any of the ranks ran, sorted.

    Attention composed of plain operators is the model's own where model.attention=eager, else torch's math kernel.
    The compiler makes plain operators part of generated kernels, which cannot be observed. A fused kernel still can, so
    that attention without any was composed.
    """
    is_eager = config.model.attention == "eager"
    unobserved = (COMPOSED,) if config.train.compile else ()
    names = {name for rank in ranks for name in rank.profiled.attention_kernels or unobserved}
    return sorted(("eager" if is_eager else "math") if name == COMPOSED else name for name in names)


def throughput_columns(config: RunConfig, ranks: Sequence[RankReport], step_seconds: float) -> Cells:
    """Return the throughput of the whole world, over the whole step.

    MFU counts the operations that the model needs, HFU those that ran (arXiv 2204.02311, appendix B), both over the
    dense peak of all devices in the compute width; they are None where a device's peak is not known.
    """
    devices = sum(rank.devices for rank in ranks)
    tokens = config.train.global_batch * config.train.seq_len
    needed, executed = model_flops(config), executed_flops(ranks)
    peak = world_peak_flops(config, ranks)
    return {
        "tokens_per_second": tokens / step_seconds,
        "tokens_per_second_per_device": tokens / step_seconds / devices,
        "cost_per_billion_tokens": cost_per_billion_tokens(config, devices, tokens / step_seconds),
        "model_flops": needed,
        "executed_flops": executed,
        "model_flops_per_second_per_device": needed / step_seconds / devices,
        "mfu": needed / step_seconds / peak if peak else None,
        "hfu": executed / step_seconds / peak if peak and executed is not None else None,
    }


def world_peak_flops(config: RunConfig, ranks: Sequence[RankReport]) -> float | None:
    """Return the dense peak of all devices in operations per second; None where a device's peak is not known."""
    peaks = [peak_flops(rank.device_name, config.precision.compute) for rank in ranks]
    return None if None in peaks else sum(p * rank.devices for p, rank in zip(peaks, ranks, strict=True) if p)


def executed_flops(ranks: Sequence[RankReport]) -> int | None:
    """Return the operations that ran in a step over all ranks; None where a process drives several devices itself."""
    return sum(rank.profiled.flops for rank in ranks) if all(rank.devices == 1 for rank in ranks) else None


def simulated_columns(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Cells:
    """Return memory, bytes, operations and time; operations are those of all ranks, if every stage was simulated."""
    executed = executed_flops(ranks) if len(ranks) == layout.pp else None
    return {
        **memory_columns(ranks),
        "attention_kernel": "+".join(attention_kernels(config, ranks)) or None,
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


def virtual_columns(layout: Layout, ranks: Sequence[RankReport], predicted: StepTime | None) -> Cells:
    """Return the times of the ranks that ran alone, and the step time with the communication that is predicted.

    A virtual run has no step_seconds and no throughput, as it did not run the whole step. What its stand-ins for
    collectives took is left out. `predicted` is None where the hardware is not known.
    """
    measured = step_time_columns(layout, ranks)
    stand_ins = measured[EXPOSED]  # None where the steps were not traced
    columns: Cells = {name: measured[name] for name in MEASURED}
    columns |= {
        "expert_load": expert_load(ranks),
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


def rank_sending_most(ranks: Sequence[RankReport]) -> RankReport:
    """Return the rank that sends most in a step."""
    return max(ranks, key=sent_bytes)


def sent_bytes(rank: RankReport) -> float:
    """Return the bytes that a rank must send in a step."""
    return sum(traffic.bytes_sent for traffic in rank.profiled.communication)


def communication_entries(layout: Layout, rank: RankReport) -> list[JsonObject]:
    """Return what one rank sends in a step by operation, mesh axis, dtype and purpose.

    `sizes` maps the bytes that a call moved to the number of such calls.
    """
    return [
        {
            "operation": traffic.operation,
            "axis": group_axes(traffic.group_ranks, layout),
            "dtype": traffic.dtype,
            "purpose": traffic.purpose,
            "bytes": traffic.bytes_sent,
            "count": traffic.count,
            "sizes": traffic.sizes,
        }
        for traffic in rank.profiled.communication
    ]


def bytes_by_axis(
    layout: Layout, rank: RankReport, expected: Mapping[str, float], padded: Mapping[str, float]
) -> list[JsonObject]:
    """Return one entry per mesh axis: the layout's bytes, the formula's, and those of other senders by their name.

    `expected` and `padded` are keyed by axis and kind, as harness.cost_model.communication returns them.
    """
    sent: dict[str, float] = defaultdict(float)
    outside: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for entry in communication_entries(layout, rank):
        if entry["purpose"] == LAYOUT:
            sent[entry["axis"]] += entry["bytes"]
        else:
            outside[entry["axis"]][f"{entry['purpose']} {entry['operation']}"] += entry["bytes"]
    formula, exact = _sums_by_axis(expected), _sums_by_axis(padded)
    entries: list[JsonObject] = [
        {
            "axis": axis,
            "bytes": sent[axis],
            "formula_bytes": formula[axis],
            "padded_bytes": exact[axis],  # with uneven shares and the library's padding, which `bytes` must be
            "outside": dict(outside[axis]),  # by function and operation: what no formula counts
        }
        for axis in sorted({*sent, *formula, *outside})
    ]
    return [entry for entry in entries if entry["bytes"] or entry["formula_bytes"] or entry["outside"]]


def _sums_by_axis(volumes: Mapping[str, float]) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for key, size in volumes.items():
        sums[key.split(" ")[0]] += size
    return sums
