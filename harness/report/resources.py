"""The report's sections on pipelines, the time of a step, and operations."""

from collections.abc import Sequence

from harness.records.schema import COLUMNS, Record
from harness.report.charts import expected, speed
from harness.report.columns import ShownColumn, from_lines, line_table, table_of
from harness.report.comparability import group_by
from harness.report.document import Paragraph, Section, Table, section
from harness.report.labels import STEP_TITLES
from harness.report.lines import Line, baseline_name, column_values
from harness.report.text import Unit, byte_unit, bytes_text, format_numbers, sentence
from harness.report.view import View

BytesByKind = dict[tuple[str, str], tuple[float, int]]  # and calls, by axis and operation


def pipeline_section(view: View) -> list[Section]:
    """Return the section on pipelines, with one row per rank of every run that has a pipeline."""
    entries = [(line, rank) for line in view.median_runs for rank in line.record.pipeline]
    if not entries:
        return []
    lines, ranks = zip(*entries, strict=True)

    def of_ranks(header: str, key: str, kind: str = "text", is_timed: bool = False) -> ShownColumn:
        ignored = column_values(lines, "is_ignored") if is_timed else ()
        return ShownColumn(header, [rank[key] for rank in ranks], kind, ignored=ignored)

    columns = [
        ShownColumn("run", column_values(lines, "label"), number=False),
        of_ranks("rank", "rank"),
        ShownColumn("stages", [", ".join(map(str, rank["stages"])) for rank in ranks]),
        ShownColumn("layers", [", ".join(map(str, rank["layers"])) for rank in ranks]),
        of_ranks("working ms", "working_seconds", "ms", is_timed=True),
        of_ranks("idle ms", "idle_seconds", "ms", is_timed=True),
        of_ranks("bubble", "bubble", "fraction", is_timed=True),
        from_lines(lines, "pipeline_bubble_theory", kind="fraction"),
        of_ranks(COLUMNS["max_in_flight_micro_batches"].title, "in_flight"),
        of_ranks("activations {unit}", "activation_bytes", "bytes"),
    ]
    return section(
        "Pipelines", table_of(columns), Paragraph(sentence("bubble_note")), Paragraph(sentence("in_flight_note"))
    )


def time(view: View) -> list[Section]:
    """Return the section on step time, with a column for each part of the median step; the parts add up to it."""
    lines = view.median_runs
    columns = [from_lines(lines, name, header, is_timed=True) for name, header in STEP_TITLES.items()]
    columns = [column for column in columns if any(column.cells)]
    if not columns:
        return []
    columns += [
        from_lines(lines, "step_seconds", is_timed=True),
        from_lines(lines, "step_seconds_p95", "95th percentile", is_timed=True),
        from_lines(lines, "step_seconds_iqr_ratio", "spread %", is_timed=True),
        from_lines(lines, "overlapped_communication_seconds", is_timed=True),
        from_lines(lines, "cpu_seconds", f"{COLUMNS['cpu_seconds'].title} s", "number", is_timed=True),
        from_lines(lines, "joules_per_token", "energy per token J", "number", is_timed=True),
    ]
    return section(
        "Breakdown of step time (ms)",
        speed.step(view),
        speed.exposed_communication(view),
        line_table(lines, columns),
        Paragraph(sentence("time_note", **_time_facts(lines))),
    )


def _time_facts(lines: Sequence[Line]) -> dict[str, bool]:
    """Return where the times of lines come from, which decides how they are to be read."""
    timed = group_by(
        [line for line in lines if line.get("step_seconds") is not None], lambda line: line.get("launch") == "simulated"
    )
    measured = timed.get(False, [])
    return {
        "is_measured": bool(measured),
        "is_pipeline": any((line.get("pp") or 1) > 1 for line in measured),
        "is_of_gpu": any(line.get("measured_on") not in (None, "cpu") for line in measured),
        "is_simulated": True in timed,
        "is_virtual": "virtual" in column_values(lines, "launch"),
    }


def operations(view: View) -> list[Section]:
    """Return the section on operations per step: the model's, those that ran, and their share of the device's peak."""
    lines = view.median_runs
    model, executed = column_values(lines, "model_flops"), column_values(lines, "executed_flops")
    if not any(model):
        return []
    ratios = [b / a if a and b else None for a, b in zip(model, executed, strict=True)]
    columns = [
        ShownColumn("model {unit} per step", model, "flops"),
        ShownColumn("executed {unit} per step", executed, "flops"),
        ShownColumn("executed / model", ratios, "ratio"),
        from_lines(lines, "model_flops_per_second_per_device", "model {unit}/s per device", "flop rate", is_timed=True),
        from_lines(lines, "mfu", "MFU %", is_timed=True),
        from_lines(lines, "hfu", "HFU %", is_timed=True),
    ]
    return section(
        "Floating-point operations",
        line_table(lines, columns),
        Paragraph(
            sentence(
                "operations_note",
                is_simulated="simulated" in column_values(lines, "launch"),
                has_mfu=any(column_values(lines, "mfu")),
            )
        ),
    )


def communication(view: View) -> list[Section]:
    """Return the section on the bytes sent: bytes and calls with a column for each mesh axis and operation."""
    lines = view.median_runs
    entries = [_by_kind(line.record) for line in lines]
    totals = column_values(lines, "communication_bytes")
    unit = byte_unit([*totals, *(size for entry in entries for size, _ in entry.values())])
    compared = baseline_name(lines)
    columns = [
        *(_calls(entries, kind, unit) for kind in sorted({kind for entry in entries for kind in entry})),
        ShownColumn("total", format_numbers(totals, unit)),
        *([from_lines(lines, "communication_bytes_ratio", "× total", "ratio")] if compared else []),
    ]
    sizes = line_table(lines, columns)
    if sizes is None:
        return []
    return section(
        f"Communication ({unit.name} per step)",
        sizes,
        Paragraph(sentence("communication_note", baseline=compared)),
    )


def _calls(entries: Sequence[BytesByKind], kind: tuple[str, str], unit: Unit) -> ShownColumn:
    """Return the column of an axis and an operation: bytes and, in brackets, calls."""
    sent = [entry.get(kind, (None, 0)) for entry in entries]
    numbers = format_numbers([size for size, _ in sent], unit)
    cells = [f"{text} ({calls:,})" if text else "" for text, (_, calls) in zip(numbers, sent, strict=True)]
    return ShownColumn(f"{kind[1]} on {kind[0]}", cells)


def _by_kind(record: Record) -> BytesByKind:
    """Return bytes and calls by axis and operation; entries of the same kind add up."""
    sums: BytesByKind = {}
    for entry in record.communication:
        kind = (str(entry["axis"]), str(entry["operation"]))
        size, calls = sums.get(kind, (0, 0))
        sums[kind] = (size + entry["bytes"], calls + entry["count"])
    return sums


def formula(view: View) -> list[Section]:
    """Return the section on the measured bytes and the formula's, with one row per run and axis, and message sizes."""
    entries = [(line.label, entry) for line in view.median_runs for entry in line.record.traffic]
    if not entries:
        return []
    labels, sent = zip(*entries, strict=True)
    outside = [", ".join(f"{name} {size:,.0f} B" for name, size in entry["outside"].items()) for entry in sent]
    ratios = [entry["bytes"] / entry["formula_bytes"] if entry["formula_bytes"] else None for entry in sent]
    columns = [
        ShownColumn("run", labels, number=False),
        ShownColumn("mesh axis", [entry["axis"] for entry in sent], number=False),
        ShownColumn("not in the formula", outside, number=False),
        ShownColumn("sent {unit}", [entry["bytes"] for entry in sent], "bytes"),
        ShownColumn("formula {unit}", [entry["formula_bytes"] for entry in sent], "bytes"),
        ShownColumn("sent / formula", ratios, "ratio"),
    ]
    return section(
        "Bytes sent compared with the formula",
        expected.traffic(view),
        table_of(columns),
        Paragraph(sentence("formula_note")),
        inner=section("Message sizes", _sizes(view)),
    )


def _sizes(view: View) -> Table | None:
    """Return the number and sizes of calls, with one row per run, axis and operation."""
    rows = []
    for line in view.median_runs:
        for entry in line.record.communication:
            sizes = {int(size): count for size, count in (entry.get("sizes") or {}).items()}
            if sizes:
                ends = [bytes_text(size) for size in (min(sizes), _median(sizes), max(sizes))]
                names = [entry["axis"], entry["operation"], entry.get("dtype", "")]
                rows.append([line.label, *names, f"{sum(sizes.values()):,}", *ends])
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
