"""Memory columns: maxima over ranks, and what filled the rank with the highest peak."""

from collections.abc import Iterable, Sequence

from harness.records.rank_report import MEMORY_ROLES, RankReport
from harness.records.schema import Cells

# The share of a peak by which the profiled step may differ from the timed ones and still explain them.
UNMATCHED = 0.05

# The share of a peak that can be rounding: torch rounds requests to 512 bytes and does not split large blocks below
# 1 MiB. A larger difference has another reason.
ROUNDING = 0.2


def memory_columns(ranks: Sequence[RankReport]) -> Cells:
    """Return maxima over ranks, and what fills the peak of the rank with the highest one."""
    fullest = peak_rank(ranks)
    # A process that drives several devices does so in threads and with copies that the meters do not observe.
    is_observed = all(rank.devices == 1 for rank in ranks)
    return {
        "peak_allocated_bytes": fullest.peak_allocated_bytes,
        "peak_requested_bytes": max_known(rank.peak_requested_bytes for rank in ranks),
        "peak_active_bytes": max_known(rank.peak_active_bytes for rank in ranks),
        "peak_reserved_bytes": max_known(rank.peak_reserved_bytes for rank in ranks),
        "peak_without_backend_bytes": max_known(rank.profiled.peak_without_backend_bytes for rank in ranks),
        "peak_rank": None if fullest.peak_allocated_bytes is None else fullest.rank,
        "parameter_bytes": max_known(rank.parameter_bytes for rank in ranks),
        "gradient_bytes": max_known(rank.profiled.gradient_bytes for rank in ranks),
        "optimizer_bytes": max_known(rank.optimizer_bytes for rank in ranks),
        "activation_bytes": max_known(rank.profiled.activation_bytes for rank in ranks) if is_observed else None,
        # On a CPU activation offload has its copies in the same memory; state is then on the device.
        "offloaded_activation_bytes": max_known(rank.profiled.offloaded_activation_bytes or None for rank in ranks),
        "offloaded_bytes": max_known(
            sum(sizes.get("cpu", 0) for sizes in rank.state_bytes_by_device.values())
            for rank in ranks
            if rank.device_name != "cpu"
        ),
        "fragmentation_bytes": max_known(fragmentation_bytes(rank) for rank in ranks),
        "non_torch_bytes": max_known(rank.non_torch_bytes for rank in ranks),
        "num_alloc_retries": sum_known(rank.num_alloc_retries for rank in ranks),
        "num_ooms": sum_known(rank.num_ooms for rank in ranks),
        **(at_peak_columns(fullest) if is_observed else {}),
    }


def peak_rank(ranks: Sequence[RankReport]) -> RankReport:
    """Return the rank with the highest peak, which in a pipeline is often not the last."""
    return max(ranks, key=lambda rank: rank.peak_allocated_bytes or 0)


def fragmentation_bytes(rank: RankReport) -> int | None:
    """Return what the caching allocator reserved at its peak beyond what tensors filled at theirs."""
    if rank.peak_reserved_bytes is None or rank.peak_allocated_bytes is None:
        return None
    return rank.peak_reserved_bytes - rank.peak_allocated_bytes


def at_peak_columns(rank: RankReport) -> Cells:
    """Return what filled the peak of the timed steps; the parts add up to it.

    On CUDA the blocks are those of the profiled step, as they were requested: `rounding` is what torch's allocator
    adds, and `unmatched` is how far the timed steps' peak is above the profiled one's. The columns are left out where
    one of these two is impossible or too large. On a CPU nothing is rounded, and the blocks are those of the timed
    step unless it asked for others than the profiled one: `unmatched` is then exact, however large.
    """
    at_peak, peak = rank.profiled.at_peak, rank.peak_allocated_bytes
    if at_peak is None or peak is None:
        return {}
    sizes = dict.fromkeys(MEMORY_ROLES, 0)
    for part in at_peak.parts:
        sizes[part.role] += part.bytes
    on_cuda = rank.peak_reserved_bytes is not None
    is_equal = rank.peak_requested_bytes == at_peak.bytes  # all else of the timed steps' peak is then rounding
    allocated = (peak if is_equal else rank.profiled.peak_allocated_bytes) or 0
    sizes["rounding"] = allocated - at_peak.bytes if on_cuda else 0
    sizes["unmatched"] = peak - sum(sizes.values())
    is_unlike = on_cuda and abs(sizes["unmatched"]) > UNMATCHED * peak
    if is_unlike or not 0 <= sizes["rounding"] <= ROUNDING * peak:
        return {}
    return {f"at_peak_{name}_bytes": size for name, size in sizes.items()} | {"peak_phase": at_peak.phase}


def max_known(values: Iterable[int | None]) -> int | None:
    """Return the largest of the known values; None if none is known."""
    return max((value for value in values if value is not None), default=None)


def sum_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
