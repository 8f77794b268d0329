"""report.md: the comparison as a page for any Markdown reader. Measured and predicted never share a column."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.records import Record
from harness.report import comparison as c
from harness.report.grid import escape, grid, labelled
from harness.report.pipelines import pipelines
from harness.report.tables import comparison_columns

_MEMORY_HEADERS = dict(zip(c.MEMORY, ("parameters", "gradients", "optimizer", "activations", "peak"), strict=True))


def page(name: str, records: Sequence[Record], problems: Sequence[str]) -> str:
    """The whole report: what was compared, what it cost, the proof, the failures, what made it."""
    table = c.frame(records)
    sections = [
        f"# {escape(name)}",
        _introduction(table, records),
        *_main(table),
        *_pivots(table),
        *_memory(table, records),
        *_peak(table),
        *_communication(table, records),
        *pipelines(table, records),
        *_predicted(table),
        *_proof(table, records),
        *_failures(table),
        *_versions(table, records),
        *_unreadable(problems),
    ]
    return "\n\n".join(sections) + "\n"


def _introduction(table: pd.DataFrame, records: Sequence[Record]) -> str:
    ended = [f"{c.values(table, 'status').count(status)} {status}" for status in c.known(table, "status")]
    shared = "; ".join(escape(phrase) for phrase in c.summary(table))
    varied = ", ".join(c.VARYING[name] for name in c.varying_columns(table))
    text = f"{len(records)} run{'s'[: len(records) > 1]} ({', '.join(ended)})"
    text += f", all of them: {shared}." if shared else "."
    text += f" What varies beside the strategy: {varied}." if varied else ""
    made_by = [f"{escape(key)} {escape(', '.join(found))}" for key, found in _made_by(records).items()]
    return text + (f" Made by {', '.join(made_by)}." if made_by else "")


def _made_by(records: Sequence[Record]) -> dict[str, list[str]]:
    """Every version of each package that made a row."""
    found: dict[str, list[str]] = {}
    for record in records:
        for key, version in (record.get("versions") or {}).items():
            if version is not None and str(version) not in found.setdefault(key, []):
                found[key].append(str(version))
    return {key: versions for key, versions in found.items() if versions}


def _main(table: pd.DataFrame) -> Iterator[str]:
    columns = comparison_columns(table, short=False)
    header = [escape(column.title) for column in columns]
    rows = [[escape(cell) for cell in cells] for cells in zip(*(column.cells for column in columns), strict=True)]
    yield "## Comparison"
    yield grid(header, rows, names=sum(not column.number for column in columns))
    baseline = c.baseline_names(table)
    yield (
        (f"× is the value over that of {escape(baseline)}. " if baseline else "")
        + "Memory is the maximum over ranks; state is parameters, gradients and optimizer; comm. is what one rank"
        " sends in one step. The deviations are the largest relative differences from the single-process reference."
        + (" The bubble is the idle time of all stages over their working time." if c.known(table, "bubble") else "")
        + (" † marks rows made by other versions, listed below." if c.known(table, "stale") else "")
    )


def _pivots(table: pd.DataFrame) -> Iterator[str]:
    """Strategy × checkpointing, where both vary and name one run each."""
    strategies, kinds = c.known(table, "strategy"), c.known(table, "checkpointing")
    pairs = list(zip(c.values(table, "strategy"), c.values(table, "checkpointing"), strict=True))
    if len(strategies) < 2 or len(kinds) < 2 or len(set(pairs)) < len(pairs):
        return
    memory = c.byte_unit(c.values(table, "peak_allocated_bytes"))
    shown = {
        f"Peak memory ({memory.name})": c.scaled(c.values(table, "peak_allocated_bytes"), memory),
        "Tokens per second": c.scaled(c.values(table, "tokens_per_second"), c.ONE),
    }
    yield "## Strategy × checkpointing"
    for title, numbers in shown.items():
        ends = zip(c.values(table, "status"), numbers, strict=True)
        cells = dict(zip(pairs, (number if status == "ok" else status for status, number in ends), strict=True))
        if any(numbers):
            rows = [[escape(s), *(cells.get((s, kind), "") for kind in kinds)] for s in strategies]
            yield f"{title}:\n\n" + grid(["strategy", *map(escape, kinds)], rows)


def _memory(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    names = (*c.MEMORY, "peak_reserved_bytes")
    unit = c.byte_unit([value for name in names for value in c.values(table, name)])
    compared = c.baseline_names(table)
    columns: dict[str, list[str]] = {}
    for name, header in _MEMORY_HEADERS.items():
        columns[header] = c.scaled(c.values(table, name), unit)
        if compared:
            columns[f"× {header}"] = c.ratios(c.values(table, f"{name}_ratio"))
    columns["peak of the least rank"] = c.scaled(_least_peaks(records), unit)
    columns["peak reserved"] = c.scaled(c.values(table, "peak_reserved_bytes"), unit)
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if columns:
        yield f"## Memory ({unit.name})"
        yield labelled(table, columns)
        yield (
            "Each column is the maximum over ranks. Parameters and optimizer at rest between steps, gradients and"
            " activations at their most; the parts need not be at their most at once, so they need not add up."
            + (f" × is over {escape(compared)}." if compared else "")
        )


def _least_peaks(records: Sequence[Record]) -> list[float | None]:
    """The peak of the rank that needed least, where every rank's is recorded."""
    peaks = [[rank.get("peak_allocated_bytes") for rank in record.get("ranks") or []] for record in records]
    return [min(found) if found and None not in found else None for found in peaks]


def _peak(table: pd.DataFrame) -> Iterator[str]:
    names = [name for name in map(str, table) if re.fullmatch("at_peak_.+_bytes", name) and c.known(table, name)]
    if names:
        unit = c.byte_unit([value for name in (*names, "peak_allocated_bytes") for value in c.values(table, name)])
        parts = {name.removeprefix("at_peak_").removesuffix("_bytes").replace("_", " "): name for name in names}
        columns = {escape(part): c.scaled(c.values(table, name), unit) for part, name in parts.items()}
        yield f"## What fills the peak ({unit.name})"
        yield labelled(table, columns | {"peak": c.scaled(c.values(table, "peak_allocated_bytes"), unit)})


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


def _predicted(table: pd.DataFrame) -> Iterator[str]:
    peaks, measured_peaks = c.values(table, "predicted_peak_bytes"), c.values(table, "peak_allocated_bytes")
    unit = c.byte_unit([*peaks, *measured_peaks])
    steps = c.values(table, "predicted_step_seconds")
    columns: dict[str, list[str]] = {}
    if any(peak is not None for peak in peaks):
        columns[f"predicted peak {unit.name}"] = c.scaled(peaks, unit)
        columns[f"measured peak {unit.name}"] = c.scaled(measured_peaks, unit)
    if any(step is not None for step in steps):
        columns["predicted step ms"] = c.scaled(steps, c.MILLISECONDS)
        columns["measured step ms"] = c.scaled(c.values(table, "step_seconds"), c.MILLISECONDS)
    if columns:
        yield "## Predicted beside measured"
        yield labelled(table, columns)


def _proof(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    proofs: list[dict[str, Any]] = [record.get("proof") or {} for record in records]
    columns = {
        "layout": [escape(proof.get("layout") or "") for proof in proofs],
        "loss deviation": c.deviations(c.values(table, "loss_deviation")),
        "loss bound": c.deviations([proof.get("loss_bound") for proof in proofs]),
        "gradient deviation": c.deviations(c.values(table, "grad_deviation")),
        "gradient bound": c.deviations([proof.get("gradient_bound") for proof in proofs]),
    }
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if columns:
        yield "## Proof"
        yield labelled(table, columns, names=1 + ("layout" in columns))
        yield (
            "Layout: whether local and global sizes of parameters, gradients and optimizer state match what the layout"
            " says. A deviation above its bound makes the run an error."
        )


def _failures(table: pd.DataFrame) -> Iterator[str]:
    columns = (c.values(table, name) for name in ("label", "status", "reason"))
    failed = [row for row in zip(*columns, strict=True) if row[1] != "ok"]
    if failed:
        lines = [f"- **{escape(label)}** {end}: {escape(why or 'no reason recorded')}" for label, end, why in failed]
        yield "## Failures"
        yield "\n".join(lines)


def _versions(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    stale = c.stale_rows(table)
    if stale:
        lines = [f"- **{escape(', '.join(labels))}**: {escape(what)}" for what, labels in stale.items()]
        yield "## Stale rows"
        yield "Made by other versions than are installed here; run them again before comparing.\n\n" + "\n".join(lines)
    environment = _shared_environment(records)
    rows = [[escape(key), escape(", ".join(found))] for key, found in (_made_by(records) | environment).items()]
    if rows:
        yield "## Versions and environment"
        yield grid(["", "value"], rows, names=2)


def _shared_environment(records: Sequence[Record]) -> dict[str, list[str]]:
    """Every value of each plain entry of the environments."""
    found: dict[str, list[str]] = {}
    for record in records:
        for key, value in (record.get("environment") or {}).items():
            if isinstance(value, (str, int, float)) and str(value) not in found.setdefault(key, []):
                found[key].append(str(value))
    return {key: values for key, values in found.items() if values}


def _unreadable(problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield "## Unreadable records"
        yield "\n".join(f"- {escape(problem)}" for problem in problems)
