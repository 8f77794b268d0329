"""What a rank sends: by operation and mesh axis, beside the layout's formula, and what no formula has."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.cost_model.communication import LAYOUT
from harness.layout.layout import Layout, group_axes
from harness.records.schema import Rank


def rank_sending_most(ranks: Sequence[Rank]) -> Rank:
    """The rank that sends most."""
    return max(ranks, key=sent_bytes)


def sent_bytes(rank: Rank) -> float:
    total: float = sum(entry["bytes_sent"] for entry in rank["profiled"]["communication"])
    return total


def communication_entries(layout: Layout, rank: Rank) -> list[dict[str, Any]]:
    """What one rank sends in a step, by operation, mesh axis, width and purpose; sizes are the bytes a call moves."""
    return [
        {
            "operation": entry["operation"],
            "axis": group_axes(entry["group_ranks"], layout),
            "dtype": entry["dtype"],
            "purpose": entry["purpose"],
            "bytes": entry["bytes_sent"],
            "count": entry["count"],
            "sizes": entry["sizes"],
        }
        for entry in rank["profiled"]["communication"]
    ]


def bytes_by_axis(layout: Layout, rank: Rank, expected: Mapping[str, float]) -> list[dict[str, Any]]:
    """One entry an axis: bytes that the layout moves, the formula's, and by caller what is outside of it.

    `expected` is by axis, or by axis and operation, as harness.plan.communication gives it.
    """
    sent: dict[str, float] = defaultdict(float)
    formula: dict[str, float] = defaultdict(float)
    outside: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for entry in communication_entries(layout, rank):
        if entry["purpose"] == LAYOUT:
            sent[entry["axis"]] += entry["bytes"]
        else:
            outside[entry["axis"]][f"{entry['purpose']} {entry['operation']}"] += entry["bytes"]
    for key, size in expected.items():
        formula[key.split(" ")[0]] += size
    axes = sorted({axis for found in (sent, formula, outside) for axis in found})
    entries = [
        {"axis": axis, "bytes": sent[axis], "formula_bytes": formula[axis], "outside": dict(outside[axis])}
        for axis in axes
    ]
    return [entry for entry in entries if entry["bytes"] or entry["formula_bytes"] or entry["outside"]]
