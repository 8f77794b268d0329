"""The columns on what a run costs beside its steps: its start, its checkpoint and its price."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.cost_model.prediction import SECONDS_PER_HOUR
from harness.metrics.memory import max_known
from harness.records.rank_report import RankReport
from harness.records.schema import Cells


def start_up_columns(config: RunConfig, ranks: Sequence[RankReport]) -> Cells:
    """Return the parts of the time until the first step is over, of the rank that took longest; they add up to it.

    The seconds of compiling are a part of the first step's. There are no columns for ranks of earlier versions, which
    did not report their start.
    """
    slowest = max((rank.start_up for rank in ranks), key=lambda start: sum(start[:4]))
    if not slowest.first_step_seconds:
        return {}
    return {
        "start_up_import_seconds": slowest.import_seconds,
        "start_up_join_seconds": slowest.join_seconds,
        "start_up_build_seconds": slowest.build_seconds,
        "first_step_seconds": slowest.first_step_seconds,
        "compile_seconds": slowest.compile_seconds if config.train.compile else None,
    }


def cost_per_billion_tokens(config: RunConfig, devices: int, tokens_per_second: float) -> float | None:
    """Return the price of a billion tokens on these devices; None where the cluster has no price for a device."""
    hardware = config.cluster.hardware
    if hardware is None or hardware.price_per_device_hour is None:
        return None
    return hardware.price_per_device_hour * devices / SECONDS_PER_HOUR * 1e9 / tokens_per_second


def checkpoint_columns(ranks: Sequence[RankReport]) -> Cells:
    """Return what a checkpoint cost: seconds of the slowest rank, bytes of the largest one and of all files."""
    reports = [rank.checkpoint for rank in ranks if rank.checkpoint is not None]
    if not reports:
        return {}
    return {
        "save_seconds": max(report.save_seconds for report in reports),
        "save_total_seconds": max(report.save_total_seconds for report in reports),
        "load_seconds": max(report.load_seconds for report in reports),
        "checkpoint_rank_bytes": max(report.rank_bytes for report in reports),
        "checkpoint_bytes": max(report.bytes for report in reports),
        "save_peak_bytes": max_known(report.save_peak_bytes for report in reports),
        "save_file_system": reports[0].file_system or None,
    }
