"""Tokens and floating-point operations per second, and their share of the devices' peak."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.cost_model.flops import model_flops
from harness.hardware.peak_flops import peak_flops
from harness.records.rank_report import RankReport
from harness.records.schema import Cells


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
