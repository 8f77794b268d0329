"""The report's last sections: failures, predictions, proofs, noise warnings, stale rows, versions and bad records."""

from collections.abc import Mapping, Sequence

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS
from harness.records.columns import column
from harness.records.schema import Record
from harness.report.charts import losses, memory
from harness.report.comparability import group_by, is_measured
from harness.report.document import BulletList, Paragraph, Section, Table, bullets, run_table, section
from harness.report.frame import column_values, compared_layers, labelled, labels_by, labels_by_staleness
from harness.report.overview import recorded_versions
from harness.report.text import MILLISECONDS, Unit, byte_unit, format_deviations, format_numbers, outcome_text
from harness.report.view import View


def failures(view: View) -> list[Section]:
    """Return the section on runs that are not ok, with their reasons."""
    failed = [
        (label, outcome_text(record.row))
        for label, record in labelled(view.table, view.records)
        if record.status != "ok"
    ]
    by_cause = group_by(failed, lambda item: item[1])
    return section("Failures", _by_cause({cause: [label for label, _ in items] for cause, items in by_cause.items()}))


def disturbed(view: View) -> list[Section]:
    """Return the section on runs with a noise warning."""
    return section("Runs with a noise warning", _by_cause(labels_by(view.table, "noise_warning")))


def stale(view: View) -> list[Section]:
    """Return the section on rows that were recorded with other versions than the installed ones."""
    rows = _by_cause(labels_by_staleness(view.table))
    words = "These rows were recorded with other versions than are installed here: run them again before comparing."
    return section("Stale rows", Paragraph(words), rows) if rows else []


def _by_cause(labels_of: Mapping[str, Sequence[str]]) -> BulletList | None:
    items = [(", ".join(labels), cause) for cause, labels in labels_of.items()]
    return BulletList(items) if items else None


def versions(view: View) -> list[Section]:
    """Return the section on the versions and environments that the rows were recorded with."""
    entries = recorded_versions(view.records) | _commits(view.records) | _environment(view.records)
    rows = [[key, ", ".join(values)] for key, values in entries.items()]
    return section("Versions and environment", Table(["name", "value"], rows, label_columns=2)) if rows else []


def _commits(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return the commits of the harness's sources that made the records."""
    commits = {f"{c['commit'][:12]}{' with changes' * c['dirty']}": None for record in records if (c := record.commit)}
    return {"commit of the harness": list(commits)} if commits else {}


def _environment(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return the distinct values of each plain entry of the environments."""
    values_of: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in record.environment.items():
            if isinstance(value, (str, int, float)):
                values_of.setdefault(key, {})[str(value)] = None
    return {key: list(values) for key, values in values_of.items()}


def unreadable(view: View) -> list[Section]:
    """Return the section on records that could not be read."""
    return section("Unreadable records", bullets(view.problems))


def predicted_section(view: View) -> list[Section]:
    """Return the section on predictions: predicted and measured values in columns of their own, and the error."""
    table = view.line_medians
    columns: dict[str, list[str]] = {}
    pairs = {"predicted_peak_bytes": "peak_allocated_bytes", "predicted_step_seconds": "step_seconds"}
    for predicted_name, measured_name in pairs.items():
        predicted, measured = (
            [value if is_measured(line.row) else None for value, line in zip(values, view.lines, strict=True)]
            for values in (column_values(table, predicted_name), column_values(table, measured_name))
        )
        if any(value is not None for value in predicted):
            quantity = column(measured_name).title
            unit: Unit = byte_unit([*predicted, *measured]) if measured_name.endswith("_bytes") else MILLISECONDS
            errors = [p / m - 1 if p is not None and m else None for p, m in zip(predicted, measured, strict=True)]
            columns[f"predicted {quantity} {unit.name}"] = format_numbers(predicted, unit)
            columns[f"measured {quantity} {unit.name}"] = format_numbers(measured, unit)
            columns[f"error of the {quantity} %"] = ["" if error is None else f"{100 * error:+.1f}" for error in errors]
    if not columns:
        return []
    words = "The error is the difference of the prediction from the measurement, relative to the measurement."
    return section("Predicted and measured values", memory.predicted(view), run_table(table, columns), Paragraph(words))


_FLOORS = (
    " Floor: how far apart two trainings of the reference are that differ in rounding only. A run that deviates much"
    " further at any step ends as an error. Steps behind the proven ones prove nothing, because rounding alone moves"
    " them too far."
)

_CHAIN = (
    " Layers compared: no single process fits the whole model, so that a layout that fits is the reference, which was"
    " itself compared with a single process on so many layers."
)


def _proven_steps(record: Record) -> str:
    """Return how many of its steps a run is proven for, such as 6 of 16; empty for records that do not say."""
    count, train = record.row.get("proven_steps"), record.config.get("train")
    if count is None or train is None:
        return "" if count is None else str(count)
    return f"{count} of {train['warmup_steps'] + train['steps'] + TRACED_STEPS + PROFILED_STEPS}"


def proof_section(view: View) -> list[Section]:
    """Return the section on proofs: the layout, and deviations from the reference beside their noise floors."""
    table = view.table
    proofs = [record.proof for record in view.records]
    columns = {
        "layout": [str(proof.get("layout") or "") for proof in proofs],
        "loss deviation": format_deviations(column_values(table, "loss_deviation")),
        "loss floor": format_deviations(column_values(table, "loss_floor")),
        "loss bound": format_deviations([proof.get("loss_bound") for proof in proofs]),
        "gradient deviation": format_deviations(column_values(table, "grad_deviation")),
        "gradient floor": format_deviations(column_values(table, "grad_floor")),
        "gradient bound": format_deviations([proof.get("gradient_bound") for proof in proofs]),
        "update deviation": format_deviations(column_values(table, "update_deviation")),
        "update floor": format_deviations(column_values(table, "update_floor")),
        "steps proven": [_proven_steps(record) for record in view.records],
    }
    columns["layers compared"] = [compared_layers(record) for record in view.records]
    skipped = column_values(table, "skipped_steps")
    if any(skipped):
        columns["skipped steps"] = ["" if count is None else str(count) for count in skipped]
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if not columns:
        return []
    return section(
        "Proof",
        *losses.losses(view),
        run_table(table, columns, label_columns=1 + ("layout" in columns)),
        Paragraph(
            "Layout: whether the local and global sizes of parameters, gradients and optimizer state are those that the"
            " layout prescribes."
            + (_FLOORS if any("deviation" in header for header in columns) else " No training was compared.")
            + (" Skipped steps made no update because a gradient overflowed." if any(skipped) else "")
            + (_CHAIN if "layers compared" in columns else "")
        ),
    )
