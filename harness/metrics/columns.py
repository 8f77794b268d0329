"""What the timed steps cost beside device time: processor seconds, host memory, energy."""

from collections.abc import Sequence
from typing import Any

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS, RunConfig
from harness.layout.layout import Layout
from harness.metrics.disturbance import disturbance_text
from harness.metrics.kernels import kernel_columns
from harness.metrics.memory import max_known, memory_columns, peak_rank
from harness.metrics.step_time import bubble_columns, step_seconds, step_time_columns
from harness.metrics.throughput import throughput_columns
from harness.metrics.traffic import sent_bytes
from harness.records.schema import Rank, Row


def resource_columns(config: RunConfig, ranks: Sequence[Rank]) -> Row:
    """Over all ranks: processor seconds a step, joules a token; of the largest process the resident bytes."""
    used = [rank["used"] for rank in ranks]
    energies = [each["energy_joules"] for each in used]
    tokens = config.train.steps * config.train.global_batch * config.train.seq_len
    return {
        "cpu_seconds": sum(each["cpu_seconds"] for each in used) / config.train.steps,
        "peak_host_bytes": max_known(each["peak_host_bytes"] for each in used),
        "joules_per_token": None if None in energies else sum(energies) / tokens,
    }


def measured_columns(config: RunConfig, layout: Layout, ranks: Sequence[Rank]) -> Row:
    """The columns of a finished run. Memory is the maximum over ranks; a step is as long as its slowest rank."""
    losses = mean_losses(ranks)
    times = step_time_columns(layout, ranks)
    seen_whole = all(rank["devices"] == 1 for rank in ranks)
    return {
        **throughput_columns(config, ranks, times["step_seconds"]),
        **times,
        **memory_columns(ranks),
        **resource_columns(config, ranks),
        **kernel_columns(config, ranks),
        "disturbed": disturbance_text(step_seconds(ranks), [rank["used"] for rank in ranks]),
        "communication_bytes": round(max(map(sent_bytes, ranks))) if seen_whole else None,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "skipped_steps": max(rank["skipped_steps"] for rank in ranks),
        "in_flight": max_known(rank["profiled"]["in_flight"] for rank in ranks),
        "measured_on": peak_rank(ranks)["device_name"],
        **bubble_columns(config, layout, ranks),
    }


def step_entries(config: RunConfig, ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """One entry a step for steps.jsonl: the world's mean loss, the global gradient norm, the slowest rank's time."""
    losses, norms = mean_losses(ranks), ranks[0]["grad_norms"]
    seconds, phases = step_seconds(ranks), step_phases(config)
    times = [None] * config.train.warmup_steps + seconds + [None] * (TRACED_STEPS + PROFILED_STEPS)
    return [
        {"step": step, "phase": phase, "loss": loss, "grad_norm": norm, "seconds": time}
        for step, (phase, loss, norm, time) in enumerate(zip(phases, losses, norms, times, strict=True))
    ]


def step_phases(config: RunConfig) -> list[str]:
    counts = {
        "warm-up": config.train.warmup_steps,
        "timed": config.train.steps,
        "traced": TRACED_STEPS,
        "profiled": PROFILED_STEPS,
    }
    return [phase for phase, steps in counts.items() for _ in range(steps)]


def mean_losses(ranks: Sequence[Rank]) -> list[float | None]:
    """Of every step over the ranks; None where one is not finite."""
    by_step = zip(*(rank["losses"] for rank in ranks), strict=True)
    return [None if None in losses else sum(losses) / len(losses) for losses in by_step]
