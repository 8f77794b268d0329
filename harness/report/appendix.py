"""The report's last sections: failures, predictions, proofs, noise warnings, stale rows, versions and bad records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS
from harness.records.columns import column
from harness.records.schema import Record
from harness.report.charts import expected
from harness.report.columns import ShownColumn, from_lines, line_table
from harness.report.comparability import is_measured
from harness.report.document import BulletList, Paragraph, Section, Table, bullets, section
from harness.report.lines import Line, column_values, compared_layers, labels_by
from harness.report.sentences import sentence
from harness.report.view import View


def failures(view: View) -> list[Section]:
    """Return the section on runs that are not ok, with their reasons."""
    failed = [line for line in view.runs if not line.ok]
    return section("Failures", _by_cause(failed, lambda line: sentence("outcome", row=line.row)))


def disturbed(view: View) -> list[Section]:
    """Return the section on runs with a noise warning."""
    return section("Runs with a noise warning", _by_cause(view.runs, lambda line: line.get("noise_warning")))


def stale(view: View) -> list[Section]:
    """Return the section on rows that were recorded with other versions than the installed ones."""
    rows = _by_cause(view.runs, lambda line: line.get("stale_reason"))
    return section("Stale rows", Paragraph(sentence("stale_rows")), rows) if rows else []


def _by_cause(lines: Sequence[Line], cause_of: Callable[[Line], str | None]) -> BulletList | None:
    items = [(", ".join(labels), cause) for cause, labels in labels_by(lines, cause_of).items()]
    return BulletList(items) if items else None


def versions(view: View) -> list[Section]:
    """Return the section on the versions, sources and environments that the rows were recorded with."""
    commits = [commit["commit"][:12] + " with changes" * commit["dirty"] for r in view.records if (commit := r.commit)]
    entries = _distinct(record.versions for record in view.records)
    entries |= _distinct({"commit of the harness": commit} for commit in commits)
    entries |= _distinct(record.environment for record in view.records)
    rows = [[key, ", ".join(values)] for key, values in entries.items()]
    return section("Versions and environment", Table(["name", "value"], rows, label_columns=2)) if rows else []


def _distinct(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, None]]:
    """Return the distinct plain values of each key, in the order in which they came."""
    values: dict[str, dict[str, None]] = {}
    for key, value in chain.from_iterable(record.items() for record in records):
        if isinstance(value, (str, int, float)):
            values.setdefault(key, {})[str(value)] = None
    return values


def unreadable(view: View) -> list[Section]:
    """Return the section on records that could not be read."""
    return section("Unreadable records", bullets(view.problems))


def predicted_section(view: View) -> list[Section]:
    """Return the section on predictions: predicted and measured values in columns of their own, and the error."""
    lines = [line for line in view.lines if is_measured(line.row)]
    columns = []
    for kind, predicted_name, measured_name in (
        ("bytes", "predicted_peak_bytes", "peak_allocated_bytes"),
        ("ms", "predicted_step_seconds", "step_seconds"),
    ):
        predicted, measured = (column_values(lines, name) for name in (predicted_name, measured_name))
        if any(value is not None for value in predicted):
            quantity = column(measured_name).title
            errors = [p / m - 1 if p is not None and m else None for p, m in zip(predicted, measured, strict=True)]
            columns += [
                ShownColumn(f"predicted {quantity} {{unit}}", predicted, kind),
                ShownColumn(f"measured {quantity} {{unit}}", measured, kind),
                ShownColumn(f"error of the {quantity} %", errors, "change"),
            ]
    if not columns:
        return []
    words = Paragraph(sentence("error_of_prediction"))
    return section("Predicted and measured values", expected.predicted(view), line_table(lines, columns), words)


def _proven_steps(record: Record) -> str:
    """Return how many of its steps a run is proven for, such as 6 of 16; empty for records that do not say."""
    count, train = record.row.get("proven_steps"), record.config.get("train")
    if count is None or train is None:
        return "" if count is None else str(count)
    return f"{count} of {train['warmup_steps'] + train['steps'] + TRACED_STEPS + PROFILED_STEPS}"


def proof_section(view: View) -> list[Section]:
    """Return the section on proofs: the layout, and deviations from the reference beside their noise floors."""
    lines, proofs = view.runs, [record.proof for record in view.records]
    skipped = column_values(lines, "skipped_steps")
    layouts = [str(proof.get("layout") or "") for proof in proofs]
    layers = [compared_layers(record) for record in view.records]
    columns = [
        ShownColumn("layout", layouts, number=not any(layouts)),
        from_lines(lines, "loss_deviation"),
        from_lines(lines, "loss_floor"),
        ShownColumn("loss bound", [proof.get("loss_bound") for proof in proofs], "deviation"),
        from_lines(lines, "grad_deviation"),
        from_lines(lines, "grad_floor"),
        ShownColumn("gradient bound", [proof.get("gradient_bound") for proof in proofs], "deviation"),
        from_lines(lines, "update_deviation"),
        from_lines(lines, "update_floor"),
        ShownColumn("steps proven", [_proven_steps(record) for record in view.records]),
        ShownColumn("layers compared", layers),
        ShownColumn("skipped steps", skipped if any(skipped) else [None] * len(skipped)),
    ]
    proof_table = line_table(lines, columns)
    if proof_table is None:
        return []
    compares = any("deviation" in column.header and column.is_known for column in columns)
    words = sentence("proof", compares=compares, skips=any(skipped), is_chained=any(layers))
    return section("Proof", *expected.losses(view), proof_table, Paragraph(words))
