"""The report's last sections: failures, predictions, proofs, noise warnings, stale rows, versions and bad records."""

from collections.abc import Mapping, Sequence

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS
from harness.records.columns import column
from harness.records.schema import Record
from harness.report.charts import expected, losses
from harness.report.columns import ShownColumn, from_frame, run_table
from harness.report.comparability import group_by, is_measured
from harness.report.document import BulletList, Paragraph, Section, Table, bullets, section
from harness.report.frame import column_values, compared_layers, labelled, labels_by, labels_by_staleness
from harness.report.overview import recorded_versions
from harness.report.text import outcome_text
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
    columns = []
    for kind, predicted_name, measured_name in (
        ("bytes", "predicted_peak_bytes", "peak_allocated_bytes"),
        ("ms", "predicted_step_seconds", "step_seconds"),
    ):
        predicted, measured = (
            [value if is_measured(line.row) else None for value, line in zip(values, view.lines, strict=True)]
            for values in (column_values(table, predicted_name), column_values(table, measured_name))
        )
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
    words = "The error is the difference of the prediction from the measurement, relative to the measurement."
    return section(
        "Predicted and measured values", expected.predicted(view), run_table(table, columns), Paragraph(words)
    )


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
    skipped = column_values(table, "skipped_steps")
    layouts = [str(proof.get("layout") or "") for proof in proofs]
    layers = [compared_layers(record) for record in view.records]
    columns = [
        ShownColumn("layout", layouts, number=not any(layouts)),
        from_frame(table, "loss_deviation"),
        from_frame(table, "loss_floor"),
        ShownColumn("loss bound", [proof.get("loss_bound") for proof in proofs], "deviation"),
        from_frame(table, "grad_deviation"),
        from_frame(table, "grad_floor"),
        ShownColumn("gradient bound", [proof.get("gradient_bound") for proof in proofs], "deviation"),
        from_frame(table, "update_deviation"),
        from_frame(table, "update_floor"),
        ShownColumn("steps proven", [_proven_steps(record) for record in view.records]),
        ShownColumn("layers compared", layers),
        ShownColumn("skipped steps", skipped if any(skipped) else [None] * len(skipped)),
    ]
    proof_table = run_table(table, columns)
    if proof_table is None:
        return []
    has_deviations = any("deviation" in column.header and column.is_known for column in columns)
    return section(
        "Proof",
        *losses.losses(view),
        proof_table,
        Paragraph(
            "Layout: whether the local and global sizes of parameters, gradients and optimizer state are those that the"
            " layout prescribes."
            + (_FLOORS if has_deviations else " No training was compared.")
            + (" Skipped steps made no update because a gradient overflowed." if any(skipped) else "")
            + (_CHAIN if any(layers) else "")
        ),
    )
