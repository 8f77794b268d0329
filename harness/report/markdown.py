"""report.md: the comparison as a page for any Markdown reader. Measured and predicted never share a column."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.records import Record
from harness.report import batches, claims, costs
from harness.report import comparison as c
from harness.report.axes import VARYING
from harness.report.grid import escape, grid, labelled
from harness.report.pipelines import pipelines
from harness.report.spread import HOW_TO_READ, merged
from harness.report.tables import comparison_columns
from harness.report.traffic import traffic


def page(name: str, records: Sequence[Record], problems: Sequence[str]) -> str:
    """The whole report: what was compared, what it cost, the proof, the failures, what made it."""
    table, lines = c.frame(records), c.frame(merged(records))
    sections = [
        f"# {escape(name)}",
        _introduction(table, records),
        *_main(lines),
        *_pivots(lines),
        *costs.memory(table, records),
        *costs.peak(table, records),
        *costs.time(table),
        *costs.speed(table),
        *traffic(table, records),
        *pipelines(table, records),
        *batches.section(table, records),
        *claims.section(merged(records)),
        *_predicted(table),
        *_proof(table, records),
        *_failures(table),
        *_disturbed(table),
        *_versions(table, records),
        *_unreadable(problems),
    ]
    return "\n\n".join(sections) + "\n"


def _introduction(table: pd.DataFrame, records: Sequence[Record]) -> str:
    ended = [f"{c.values(table, 'status').count(status)} {status}" for status in c.known(table, "status")]
    shared = "; ".join(escape(phrase) for phrase in c.summary(table))
    varied = ", ".join(VARYING[name] for name in c.varying_columns(table))
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
        + "Memory is the maximum over ranks; state is parameters, gradients and optimizer, on the device and the host;"
        " comm. is what one rank sends in one step. The deviations are the largest relative differences from the"
        " single-process reference."
        + (" The bubble is the idle time of all stages over their working time." if c.known(table, "bubble") else "")
        + (f" {HOW_TO_READ}" if baseline or c.known(table, "between_runs") else "")
        + (" ‡ marks runs that something disturbed, listed below." if any(c.values(table, "disturbed")) else "")
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
    skipped = c.values(table, "skipped_steps")
    if any(skipped):
        columns["skipped steps"] = ["" if count is None else str(count) for count in skipped]
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if columns:
        yield "## Proof"
        yield labelled(table, columns, names=1 + ("layout" in columns))
        yield (
            "Layout: whether local and global sizes of parameters, gradients and optimizer state match what the layout"
            " says. A deviation above its bound makes the run an error."
            + (" Skipped steps were left out because a gradient overflowed." if any(skipped) else "")
        )


def _failures(table: pd.DataFrame) -> Iterator[str]:
    columns = (c.values(table, name) for name in ("label", "status", "reason"))
    failed = [row for row in zip(*columns, strict=True) if row[1] != "ok"]
    if failed:
        lines = [f"- **{escape(label)}** {end}: {escape(why or 'no reason recorded')}" for label, end, why in failed]
        yield "## Failures"
        yield "\n".join(lines)


def _disturbed(table: pd.DataFrame) -> Iterator[str]:
    found = c.labels_by(table, "disturbed")
    if found:
        yield "## Disturbed runs"
        yield "\n".join(f"- **{escape(', '.join(labels))}**: {escape(why)}" for why, labels in found.items())


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
