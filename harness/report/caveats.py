"""The limitations of a folder's figures, derived from the records themselves."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.records.schema import Record
from harness.report.comparability import group_by, is_measured
from harness.report.document import Section, bullets, section
from harness.report.lines import Line, column_values, compared_layers, labels_by, labels_by_kernel
from harness.report.sentences import sentence
from harness.report.speeds import is_crowded
from harness.report.text import span_text
from harness.report.view import View

Facts = dict[str, Any]  # what each kind of caveat concerns; there is none where that is empty


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    ok = [record for record in view.records if record.status == "ok"]
    facts = _of_figures(view.lines, ok) | _of_comparisons(view, ok) | _of_what_is_missing(view.lines, ok)
    sentences = (sentence(kind, of=of, total=len(view.lines)) for kind, of in facts.items() if of)
    return section("What the data cannot say", bullets(sentences))


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
    """Return which settings a run by DeepSpeed has: the papers', the library's own, or others."""
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
