"""The report's sections on what the figures rest on: predictions beside measurements, the proof, the losses."""

from harness.report import comparison as c
from harness.report.charts import memory, training
from harness.report.document import Prose, Section, labelled, section
from harness.report.view import View


def predicted(view: View) -> list[Section]:
    """Peaks and steps, predicted and measured in columns of their own, and the error of the one by the other."""
    table = view.middle_runs.table
    columns: dict[str, list[str]] = {}
    pairs = {
        "peak": ("predicted_peak_bytes", "peak_allocated_bytes"),
        "step": ("predicted_step_seconds", "step_seconds"),
    }
    for what, (name, measured_name) in pairs.items():
        expected, measured = c.values(table, name), c.values(table, measured_name)
        if any(value is not None for value in expected):
            unit = c.byte_unit([*expected, *measured]) if what == "peak" else c.MILLISECONDS
            errors = [p / m - 1 if p is not None and m else None for p, m in zip(expected, measured, strict=True)]
            columns[f"predicted {what} {unit.name}"] = c.scaled(expected, unit)
            columns[f"measured {what} {unit.name}"] = c.scaled(measured, unit)
            columns[f"error of the {what} %"] = ["" if error is None else f"{100 * error:+.1f}" for error in errors]
    if not columns:
        return []
    words = "The error is the prediction's relative to the measurement."
    return section("Predicted beside measured", memory.predicted(view), labelled(table, columns), Prose(words))


def proof(view: View) -> list[Section]:
    table = view.table
    proofs = [record.get("proof") or {} for record in view.records]
    columns = {
        "layout": [str(proof.get("layout") or "") for proof in proofs],
        "loss deviation": c.deviations(c.values(table, "loss_deviation")),
        "loss bound": c.deviations([proof.get("loss_bound") for proof in proofs]),
        "gradient deviation": c.deviations(c.values(table, "grad_deviation")),
        "gradient bound": c.deviations([proof.get("gradient_bound") for proof in proofs]),
    }
    skipped = c.values(table, "skipped_steps")
    if any(skipped):
        columns["skipped steps"] = ["" if count is None else str(count) for count in skipped]
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if not columns:
        return []
    return section(
        "Proof",
        training.losses(view),
        labelled(table, columns, names=1 + ("layout" in columns)),
        Prose(
            "Layout: whether local and global sizes of parameters, gradients and optimizer state match what the layout"
            " says. A deviation above its bound makes the run an error."
            + (" Skipped steps were left out because a gradient overflowed." if any(skipped) else "")
        ),
    )
