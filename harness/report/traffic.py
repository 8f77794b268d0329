"""The page's section on bytes: by mesh axis and operation, beside the layout's formula, and what no formula has."""

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.records import Record
from harness.report import comparison as c
from harness.report.grid import escape, grid, labelled


def traffic(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """What the rank that sends most sends: in all, against the formula, and the sizes of its messages."""
    yield from _communication(table, records)
    yield from _formula(table, records)
    yield from _sizes(table, records)


def _communication(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """Bytes and calls by mesh axis and operation, a column each."""
    entries = [_by_kind(record) for record in records]
    kinds = sorted({kind for entry in entries for kind in entry})
    unit = c.byte_unit([*c.values(table, "communication_bytes"), *(v for entry in entries for v, _ in entry.values())])
    columns: dict[str, list[str]] = {}
    for axis, operation in kinds:
        found = [entry.get((axis, operation), (None, 0)) for entry in entries]
        numbers = c.scaled([value for value, _ in found], unit)
        cells = [f"{text} ({calls:,})" if text else "" for text, (_, calls) in zip(numbers, found, strict=True)]
        columns[f"{escape(operation)} on {escape(axis)}"] = cells
    columns["in all"] = c.scaled(c.values(table, "communication_bytes"), unit)
    compared = c.baseline_names(table)
    columns["× in all"] = c.ratios(c.values(table, "communication_bytes_ratio")) if compared else [""] * len(table)
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if columns:
        yield f"## Communication ({unit.name} a step)"
        yield labelled(table, columns)
        yield (
            "What the rank that sends most must send in one step under ring algorithms, counted from the operators that"
            " ran, by the mesh axis they ran along; calls in parentheses."
            + (f" × is over {escape(compared)}." if compared else "")
        )


def _by_kind(record: Record) -> dict[tuple[str, str], tuple[float, int]]:
    """Bytes and calls by (axis, operation); entries of the same kind add up."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for entry in record.get("communication") or []:
        kind = (str(entry["axis"]), str(entry["operation"]))
        size, calls = sums.get(kind, (0, 0))
        sums[kind] = (size + entry["bytes"], calls + entry["count"])
    return sums


def _formula(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """A row a run and axis."""
    entries = [
        (label, entry)
        for label, record in zip(c.values(table, "label"), records, strict=True)
        for entry in record.get("traffic") or []
    ]
    if not entries:
        return
    unit = c.byte_unit([entry[key] for _, entry in entries for key in ("bytes", "formula_bytes")])
    ratios = [entry["bytes"] / entry["formula_bytes"] if entry["formula_bytes"] else None for _, entry in entries]
    columns = {
        "run": [escape(label) for label, _ in entries],
        "axis": [escape(entry["axis"]) for _, entry in entries],
        "outside the formula": [
            escape(", ".join(f"{name} {size:,.0f} B" for name, size in entry["outside"].items()))
            for _, entry in entries
        ],
        f"sent {unit.name}": c.scaled([entry["bytes"] for _, entry in entries], unit),
        f"formula {unit.name}": c.scaled([entry["formula_bytes"] for _, entry in entries], unit),
        "sent / formula": c.ratios(ratios),
    }
    yield "## Bytes against the formula"
    yield grid(list(columns), list(zip(*columns.values(), strict=True)), names=3)
    yield (
        "The formula is the papers' volume for this layout, model and number of micro-batches. Outside of it are"
        " scalars, named by the function that sends them: gradient norms, losses, overflow flags."
    )


def _sizes(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """How many calls of which size, a row a run, axis and operation."""
    rows = []
    for label, record in zip(c.values(table, "label"), records, strict=True):
        for entry in record.get("communication") or []:
            sizes = {int(size): count for size, count in (entry.get("sizes") or {}).items()}
            if sizes:
                ordered = sorted(size for size, count in sizes.items() for _ in range(count))
                ends = [c.bytes_text(size) for size in (ordered[0], ordered[len(ordered) // 2], ordered[-1])]
                names = [escape(label), escape(entry["axis"]), escape(entry["operation"]), escape(entry["dtype"])]
                rows.append([*names, f"{len(ordered):,}", *ends])
    if rows:
        yield "### Sizes of calls"
        yield grid(["run", "axis", "operation", "width", "calls", "smallest", "median", "largest"], rows, names=4)
