"""The report's last sections: what failed and why, what was disturbed, what made the rows, what could not be read."""

from collections.abc import Mapping, Sequence

from harness.records.schema import Record
from harness.report.charts import losses, memory
from harness.report.document import BulletList, Paragraph, Section, Table, labelled, section
from harness.report.frame import column_values, labels_by, labels_by_staleness
from harness.report.overview import made_by_versions
from harness.report.text import MILLISECONDS, byte_unit, format_deviations, format_numbers
from harness.report.view import View


def failures(view: View) -> list[Section]:
    columns = (column_values(view.table, name) for name in ("label", "status", "reason"))
    failed = [row for row in zip(*columns, strict=True) if row[1] != "ok"]
    told = [(label, f"{end}: {why or 'no reason recorded'}") for label, end, why in failed]
    return section("Failures", BulletList(told) if told else None)


def disturbed(view: View) -> list[Section]:
    return section("Disturbed runs", _by_cause(labels_by(view.table, "disturbed")))


def stale(view: View) -> list[Section]:
    found = _by_cause(labels_by_staleness(view.table))
    words = "Made by other versions than are installed here; run them again before comparing."
    return section("Stale rows", Paragraph(words), found) if found else []


def _by_cause(found: Mapping[str, Sequence[str]]) -> BulletList | None:
    return BulletList([(", ".join(labels), what) for what, labels in found.items()]) if found else None


def versions(view: View) -> list[Section]:
    rows = [
        [key, ", ".join(found)] for key, found in (made_by_versions(view.records) | _environment(view.records)).items()
    ]
    return section("Versions and environment", Table(["", "value"], rows, names=2)) if rows else []


def _environment(records: Sequence[Record]) -> dict[str, list[str]]:
    """Every value of each plain entry of the environments."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in record.environment.items():
            if isinstance(value, (str, int, float)):
                found.setdefault(key, {})[str(value)] = None
    return {key: list(values) for key, values in found.items()}


def unreadable(view: View) -> list[Section]:
    return section(
        "Unreadable records", BulletList([("", problem) for problem in view.problems]) if view.problems else None
    )


def predicted_section(view: View) -> list[Section]:
    """Peaks and steps, predicted and measured in columns of their own, and the error of the one by the other."""
    table = view.median_runs.table
    columns: dict[str, list[str]] = {}
    pairs = {
        "peak": ("predicted_peak_bytes", "peak_allocated_bytes"),
        "step": ("predicted_step_seconds", "step_seconds"),
    }
    for what, (name, measured_name) in pairs.items():
        expected, measured = column_values(table, name), column_values(table, measured_name)
        if any(value is not None for value in expected):
            unit = byte_unit([*expected, *measured]) if what == "peak" else MILLISECONDS
            errors = [p / m - 1 if p is not None and m else None for p, m in zip(expected, measured, strict=True)]
            columns[f"predicted {what} {unit.name}"] = format_numbers(expected, unit)
            columns[f"measured {what} {unit.name}"] = format_numbers(measured, unit)
            columns[f"error of the {what} %"] = ["" if error is None else f"{100 * error:+.1f}" for error in errors]
    if not columns:
        return []
    words = "The error is the prediction's relative to the measurement."
    return section("Predicted beside measured", memory.predicted(view), labelled(table, columns), Paragraph(words))


def proof_section(view: View) -> list[Section]:
    table = view.table
    proofs = [record.proof for record in view.records]
    columns = {
        "layout": [str(proof.get("layout") or "") for proof in proofs],
        "loss deviation": format_deviations(column_values(table, "loss_deviation")),
        "loss bound": format_deviations([proof.get("loss_bound") for proof in proofs]),
        "gradient deviation": format_deviations(column_values(table, "grad_deviation")),
        "gradient bound": format_deviations([proof.get("gradient_bound") for proof in proofs]),
    }
    skipped = column_values(table, "skipped_steps")
    if any(skipped):
        columns["skipped steps"] = ["" if count is None else str(count) for count in skipped]
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if not columns:
        return []
    return section(
        "Proof",
        losses.losses(view),
        labelled(table, columns, names=1 + ("layout" in columns)),
        Paragraph(
            "Layout: whether local and global sizes of parameters, gradients and optimizer state match what the layout"
            " says. A deviation above its bound makes the run an error."
            + (" Skipped steps were left out because a gradient overflowed." if any(skipped) else "")
        ),
    )
