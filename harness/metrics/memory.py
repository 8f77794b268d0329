"""Memory over ranks, and what filled the fullest rank at its peak."""

from collections.abc import Iterable, Sequence

from harness.records.schema import MEMORY_ROLES, Rank, Row

UNMATCHED = 0.05  # of a peak: beyond that the profiled step tells nothing of the timed ones

ROUNDING = 0.2  # of a peak: requests are rounded to 512 bytes, large blocks not split below 1 MiB; more is no rounding


def memory_columns(ranks: Sequence[Rank]) -> Row:
    """Maxima over ranks; what fills the peak is of the rank where it is highest."""
    peaked = peak_rank(ranks)
    # A process that drives several devices does so in threads and copies that the meters do not see.
    seen_whole = all(rank["devices"] == 1 for rank in ranks)
    return {
        "peak_allocated_bytes": peaked["peak_allocated_bytes"],
        "peak_reserved_bytes": max_known(rank["peak_reserved_bytes"] for rank in ranks),
        "peak_rank": None if peaked["peak_allocated_bytes"] is None else peaked["rank"],
        "parameter_bytes": max_known(rank["parameter_bytes"] for rank in ranks),
        "gradient_bytes": max_known(rank["profiled"]["gradient_bytes"] for rank in ranks),
        "optimizer_bytes": max_known(rank["optimizer_bytes"] for rank in ranks),
        "activation_bytes": max_known(rank["profiled"]["activation_bytes"] for rank in ranks) if seen_whole else None,
        "offloaded_activation_bytes": max_known(offloaded_activation_bytes(rank) for rank in ranks),
        "offloaded_bytes": max_known(offloaded_state_bytes(rank) for rank in ranks),
        "fragmentation_bytes": max_known(fragmentation_bytes(rank) for rank in ranks),
        "outside_bytes": max_known(rank["outside_bytes"] for rank in ranks),
        "allocation_retries": sum_known(rank["allocation_retries"] for rank in ranks),
        "out_of_memory_errors": sum_known(rank["out_of_memory_errors"] for rank in ranks),
        **(at_peak_columns(peaked) if seen_whole else {}),
    }


def peak_rank(ranks: Sequence[Rank]) -> Rank:
    """The rank whose peak is highest: with a pipeline often not the last."""
    return max(ranks, key=lambda rank: rank["peak_allocated_bytes"] or 0)


def offloaded_state_bytes(rank: Rank) -> int | None:
    """Bytes of model state on the host; unknown where the host's memory is the device's."""
    if rank["device_name"] == "cpu":
        return None
    size: int = sum(bytes_by_device.get("cpu", 0) for bytes_by_device in rank["placed"].values())
    return size


def offloaded_activation_bytes(rank: Rank) -> int | None:
    """The most that activation offload held on the host, on a CPU in the same memory; None without it."""
    size: int = rank["profiled"]["offloaded_activation_bytes"]
    return size or None


def fragmentation_bytes(rank: Rank) -> int | None:
    """What the caching allocator took from the device beyond what tensors filled, each at its most."""
    reserved = rank["peak_reserved_bytes"]
    return None if reserved is None else reserved - rank["peak_allocated_bytes"]


def at_peak_columns(rank: Rank) -> Row:
    """What filled the peak of the timed steps; the parts add up to it.

    On CUDA the blocks are those of the profiled step, as they were requested: `rounding` is what torch's allocator
    adds, `unmatched` what the timed steps' peak is above the profiled one's. Where one of them cannot be, or is much,
    nothing is said; nor on a CPU, where both must be 0, if the profiled step asked for other blocks.
    """
    found, peak = rank["profiled"]["at_peak"], rank["peak_allocated_bytes"]
    if found is None:
        return {}
    sums = dict.fromkeys(MEMORY_ROLES, 0)
    for part in found["parts"]:
        sums[part["role"]] += part["bytes"]
    on_cuda = rank["peak_reserved_bytes"] is not None
    sums["rounding"] = rank["profiled"]["peak_allocated_bytes"] - found["bytes"] if on_cuda else 0
    sums["unmatched"] = peak - sum(sums.values())
    if abs(sums["unmatched"]) > (UNMATCHED * peak if on_cuda else 0) or not 0 <= sums["rounding"] <= ROUNDING * peak:
        return {}
    return {f"at_peak_{name}_bytes": size for name, size in sums.items()} | {"peak_phase": found["phase"]}


def max_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
