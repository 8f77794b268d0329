"""What limits a folder's figures: caveats, failures, predictions, proofs, papers, noise, stale rows and versions."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS
from harness.metrics.formulas import EXACT
from harness.records.schema import COLUMNS, Record
from harness.report.charts import expected
from harness.report.claims import TIMED, claims
from harness.report.columns import ShownColumn, from_lines, line_table
from harness.report.comparability import group_by, is_measured
from harness.report.document import BulletList, Paragraph, Section, Table, bullets, section
from harness.report.lines import Line, column_values, compared_layers, labels_by, labels_by_kernel
from harness.report.speeds import is_crowded
from harness.report.text import sentence, span_text
from harness.report.view import View

Facts = dict[str, Any]  # what each kind of caveat concerns; there is none where that is empty


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    ok = [record for record in view.records if record.status == "ok"]
    alone = [record for record in view.records if record.is_row_alone]
    facts: Facts = (
        {"of_table": alone}
        | _of_figures(view.lines, ok)
        | _of_comparisons(view, ok)
        | _of_what_is_missing(view.lines, ok)
    )
    return section(
        "What the data cannot say",
        bullets(sentence(kind, of=of, total=len(view.lines)) for kind, of in facts.items() if of),
    )


def _concerned(lines: Sequence[Line], concerns: Callable[[Line], Any]) -> list[str]:
    return [line.label for line in lines if concerns(line)]


def _of_figures(lines: Sequence[Line], ok: Sequence[Record]) -> Facts:
    """Return the caveats of devices and of speeds: the first screen says what would rank these."""
    on_cpu = [record for record in ok if record.row.get("measured_on") == "cpu"]
    ranks = {count: record.row["world_size"] for record in on_cpu if (count := record.environment.get("threads"))}
    few = [line for line in lines if line.speed.has_too_few_runs]
    return {
        "of_cpu": on_cpu,
        "of_one_rank": ranks if len(ranks) > 1 and ranks[max(ranks)] == 1 else None,
        "of_shared_cores": [run for run in ok if is_crowded(run) and run.row.get("step_seconds") is not None],
        "of_virtual_worlds": _concerned(lines, lambda line: line.ok and line.get("launch") == "virtual"),
        "of_simulations": _concerned(lines, lambda line: line.ok and line.get("launch") == "simulated"),
        "of_few_runs": labels_by(few, lambda line: line.speed.unranked_reason),
        "of_disturbances": _concerned(lines, lambda line: line.speed.is_disturbed),
        "of_uncertain_differences": _concerned(lines, lambda line: line.get("unsettled")),
    }


def _of_comparisons(view: View, ok: Sequence[Record]) -> Facts:
    """Return in what else than their strategies rows differ, and which settings speeds by DeepSpeed belong to."""
    machines = {(str(record.versions), str(record.environment.get("processor"))) for record in ok}
    lines = [line for line in view.lines if line.ok]
    by_setting = labels_by(filter(_is_deepspeed_zero, lines), _setting)
    return {
        "of_kernels": labels_by_kernel(view.lines),
        "of_stale_rows": _concerned(view.lines, lambda line: line.get("stale_reason")),
        "of_several_machines": len(machines) > 1,
        "of_deepspeed_settings": by_setting if len(lines) > 1 and view.draws_speeds else None,
    }


def _is_deepspeed_zero(line: Line) -> bool:
    """Return whether DeepSpeed implements ZeRO in this run, also where Accelerate calls it."""
    by_deepspeed = line.get("engine") == "deepspeed"
    by_accelerate = line.get("engine") == "accelerate" and line.get("data_parallel") in (None, "none")
    return by_deepspeed or (by_accelerate and bool(line.get("zero_stage")))


def _setting(line: Line) -> str:
    """Return which settings a run by DeepSpeed has: the papers', the library's own, or others; '' where not known."""
    if line.record.is_row_alone:
        return ""
    strategy = line.record.config.get("strategy") or {}
    if strategy.get("literature", True):
        return "literature"
    return "options" if strategy.get("options") else "default"


def _of_what_is_missing(lines: Sequence[Line], ok: Sequence[Record]) -> Facts:
    """Return what was not proven, not measured or not varied."""
    real = [line for line in lines if line.ok and is_measured(line.row)]
    steps = sorted({(line.record.config.get("train") or {}).get("steps") or 0 for line in real} - {0})
    nodes = {record.environment.get("nodes") or 1 for record in ok if is_measured(record.row)}
    is_parallel = any((line.get("world_size") or 1) > 1 for line in real)
    models = {(line.get("model"), line.get("parameters")) for line in lines}
    return {
        "of_no_reference": _concerned(real, lambda line: line.get("loss_deviation") is None),
        "of_fewer_layers": _concerned(real, lambda line: compared_layers(line.record)),
        "of_few_steps": steps and [steps, min(line.get("proven_steps") or 0 for line in real)],
        "of_failures": _concerned(lines, lambda line: not line.ok),
        "of_notes": labels_by(lines, lambda line: "; ".join(line.record.notes)),
        "of_no_memory": _concerned(lines, lambda line: line.ok and line.get("peak_allocated_bytes") is None),
        "of_one_machine": is_parallel and nodes == {1},
        "of_one_model": column_values(lines, "launch") if len(models) == 1 else None,
    }


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def by_kind(causes: Iterable[tuple[str, str]], separator: str = "; ") -> dict[str, list[str]]:
    """Return the labels of rows by the kind of their causes.

    Args:
        causes: Labels with their causes. Phrases of causes that differ in a number alone are of one kind, whose text
            has the range of that number.
        separator: What joins the phrases of a cause.
    """
    phrases = [(label, _NUMBER.split(phrase)) for label, cause in causes for phrase in cause.split(separator)]
    kinds = group_by(phrases, lambda entry: tuple(entry[1][::2]))
    return {
        _with_ranges([phrase for _, phrase in entries]): list(dict.fromkeys(label for label, _ in entries))
        for entries in kinds.values()
    }


def _with_ranges(phrases: Iterable[Sequence[str]]) -> str:
    """Return the text of phrases, each split at its numbers, with a range in the place of every number that differs."""
    columns = [list(dict.fromkeys(column)) for column in zip(*phrases, strict=True)]
    columns[1::2] = [sorted(numbers, key=float) for numbers in columns[1::2]]
    return "".join(map(span_text, columns))


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
    entries = (
        _distinct(record.versions for record in view.records)
        | _distinct({"commit of the harness": commit} for commit in commits)
        | _distinct(record.environment for record in view.records)
    )
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
            quantity = COLUMNS[measured_name].title
            errors = [p / m - 1 if p is not None and m else None for p, m in zip(predicted, measured, strict=True)]
            columns += [
                ShownColumn(f"predicted {quantity} {{unit}}", predicted, kind),
                ShownColumn(f"measured {quantity} {{unit}}", measured, kind),
                ShownColumn(f"error of the {quantity} %", errors, "change"),
            ]
    if not columns:
        return []
    return section(
        "Predicted and measured values",
        expected.predicted(view),
        line_table(lines, columns),
        Paragraph(sentence("error_of_prediction")),
    )


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
    return section(
        "Proof",
        *expected.losses(view),
        proof_table,
        Paragraph(sentence("proof", compares=compares, skips=any(skipped), is_chained=any(layers))),
    )


def literature(view: View) -> list[Section]:
    """Return the section with a table of one row per claim."""
    view_claims = claims(view.lines)
    if not view_claims:
        return []
    header = ["run", "claim", "source", "paper's figure", "verdict", "expected at this layout", "measured"]
    rows = [
        [
            *(claim.label, claim.claim, claim.source, claim.limit, sentence("verdict", claim=claim)),
            *(f"{figure:.3g}" for figure in (claim.expected, claim.measured)),
        ]
        for claim in view_claims
    ]
    free = [claim for claim in view_claims if not (claim.required and claim.agrees)]
    return section(
        "Comparison with the literature",
        expected.measured_against_papers(view, view_claims),
        Table(header, rows, label_columns=5),
        Paragraph(sentence("literature", claims=free, exact=EXACT, timed=TIMED)),
    )
