"""The report's sections on communication: bytes by mesh axis and operation, compared with the layout's formula."""

from collections.abc import Iterator

from harness.records.schema import Record
from harness.report.charts import traffic
from harness.report.document import Paragraph, Section, Table, run_table, section
from harness.report.frame import baseline_name, column_values
from harness.report.text import byte_unit, bytes_text, format_numbers, format_ratios
from harness.report.view import View


def traffic_section(view: View) -> list[Section]:
    """Return the sections on the bytes sent: in total, compared with the formula, and by message size."""
    return [*_communication(view), *_formula(view)]


def _communication(view: View) -> list[Section]:
    """Return bytes and calls with a column for each mesh axis and operation."""
    table = view.median_runs.table
    entries = [_by_kind(record) for record in view.median_runs.records]
    kinds = sorted({kind for entry in entries for kind in entry})
    unit = byte_unit(
        [*column_values(table, "communication_bytes"), *(v for entry in entries for v, _ in entry.values())]
    )
    columns: dict[str, list[str]] = {}
    for axis, operation in kinds:
        sent = [entry.get((axis, operation), (None, 0)) for entry in entries]
        numbers = format_numbers([size for size, _ in sent], unit)
        cells = [f"{text} ({calls:,})" if text else "" for text, (_, calls) in zip(numbers, sent, strict=True)]
        columns[f"{operation} on {axis}"] = cells
    columns["total"] = format_numbers(column_values(table, "communication_bytes"), unit)
    compared = baseline_name(table)
    columns["× total"] = (
        format_ratios(column_values(table, "communication_bytes_ratio")) if compared else [""] * len(table)
    )
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if not columns:
        return []
    return section(
        f"Communication ({unit.name} per step)",
        run_table(table, columns),
        Paragraph(
            "The bytes that the rank that sends most must send in one step under ring algorithms, counted from the"
            " collectives that ran, by operation and mesh axis; the number of calls is in parentheses."
            + (f" × is the ratio to {compared}." if compared else "")
        ),
    )


def _labelled(view: View) -> Iterator[tuple[str, Record]]:
    runs = view.median_runs
    return zip(column_values(runs.table, "label"), runs.records, strict=True)


def _by_kind(record: Record) -> dict[tuple[str, str], tuple[float, int]]:
    """Return bytes and calls by axis and operation; entries of the same kind add up."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for entry in record.communication:
        kind = (str(entry["axis"]), str(entry["operation"]))
        size, calls = sums.get(kind, (0, 0))
        sums[kind] = (size + entry["bytes"], calls + entry["count"])
    return sums


def _formula(view: View) -> list[Section]:
    """Return the measured bytes and those of the formula, with one row per run and axis."""
    entries = [(label, entry) for label, record in _labelled(view) for entry in record.traffic]
    if not entries:
        return []
    unit = byte_unit([entry[key] for _, entry in entries for key in ("bytes", "formula_bytes")])
    ratios = [entry["bytes"] / entry["formula_bytes"] if entry["formula_bytes"] else None for _, entry in entries]
    columns = {
        "run": [label for label, _ in entries],
        "mesh axis": [entry["axis"] for _, entry in entries],
        "not in the formula": [
            ", ".join(f"{name} {size:,.0f} B" for name, size in entry["outside"].items()) for _, entry in entries
        ],
        f"sent {unit.name}": format_numbers([entry["bytes"] for _, entry in entries], unit),
        f"formula {unit.name}": format_numbers([entry["formula_bytes"] for _, entry in entries], unit),
        "sent / formula": format_ratios(ratios),
    }
    return section(
        "Bytes sent compared with the formula",
        traffic.traffic(view),
        Table(list(columns), list(zip(*columns.values(), strict=True)), label_columns=3),
        Paragraph(
            "The formula is the volume that the papers give, for this layout, model and number of micro-batches. It"
            " does not include scalars such as gradient norms, losses and overflow flags, which are listed under the"
            " name of the function that sends them."
        ),
        inner=section("Message sizes", _sizes(view)),
    )


def _sizes(view: View) -> Table | None:
    """Return the number and sizes of calls, with one row per run, axis and operation."""
    rows = []
    for label, record in _labelled(view):
        for entry in record.communication:
            sizes = {int(size): count for size, count in (entry.get("sizes") or {}).items()}
            if sizes:
                ends = [bytes_text(size) for size in (min(sizes), _median(sizes), max(sizes))]
                names = [str(entry[key]) for key in ("axis", "operation", "dtype")]
                rows.append([label, *names, f"{sum(sizes.values()):,}", *ends])
    header = ["run", "mesh axis", "operation", "dtype", "calls", "smallest", "median", "largest"]
    return Table(header, rows, label_columns=4) if rows else None


def _median(counts: dict[int, int]) -> int:
    """Return the median of sizes that are given with their counts; of an even number of calls the upper one."""
    rank = sum(counts.values()) // 2
    for size in sorted(counts):
        rank -= counts[size]
        if rank < 0:
            return size
    raise ValueError("no sizes")
