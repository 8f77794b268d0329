"""Tokens and operations a second, and what share of the devices' peak they are."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.cost_model.flops import model_flops
from harness.hardware.peak_flops import peak_flops
from harness.records.schema import Rank, Row


def throughput_columns(config: RunConfig, ranks: Sequence[Rank], step_seconds: float) -> Row:
    """Of the whole world and the whole step.

    MFU takes the operations that the model asks for, HFU those that ran (arXiv 2204.02311, appendix B), both over the
    dense peak of all devices in the compute width; empty where a device's peak is not known.
    """
    devices = sum(rank["devices"] for rank in ranks)
    tokens = config.train.global_batch * config.train.seq_len
    wanted, ran = model_flops(config), executed_flops(ranks)
    peaks = [peak_flops(rank["device_name"], config.precision.compute) for rank in ranks]
    peak = None if None in peaks else sum(p * rank["devices"] for p, rank in zip(peaks, ranks, strict=True) if p)
    return {
        "tokens_per_second": tokens / step_seconds,
        "tokens_per_second_per_device": tokens / step_seconds / devices,
        "model_flops": wanted,
        "hardware_flops": ran,
        "model_flops_per_second_per_device": wanted / step_seconds / devices,
        "mfu": wanted / step_seconds / peak if peak else None,
        "hfu": ran / step_seconds / peak if peak and ran is not None else None,
    }


def executed_flops(ranks: Sequence[Rank]) -> int | None:
    """Operations that ran in a step, over all ranks; unknown where a process drives devices by threads of its own."""
    if any(rank["devices"] != 1 for rank in ranks):
        return None
    total: int = sum(rank["profiled"]["flops"] for rank in ranks)
    return total
