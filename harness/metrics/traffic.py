"""The bytes that a rank sends by operation and mesh axis, beside those of the layout's formula and of other senders."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from harness.cost_model.communication import LAYOUT
from harness.layout.layout import Layout, group_axes
from harness.records.rank_report import RankReport
from harness.util.files import JsonObject


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
