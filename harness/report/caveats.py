"""The limitations of a folder's figures, derived from the records themselves."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.records.schema import Record
from harness.report.comparability import is_measured
from harness.report.document import Section, bullets, section
from harness.report.lines import Line, compared_layers, labels_by, labels_by_kernel
from harness.report.sentences import sentence
from harness.report.speeds import is_crowded
from harness.report.text import span_text
from harness.report.view import View

Facts = dict[str, Any]  # what each kind of caveat concerns; there is none where that is empty


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    ok = [record for record in view.records if record.status == "ok"]
    facts = _of_figures(view, ok) | _of_comparisons(view, ok) | _of_what_is_missing(view, ok)
    sentences = (sentence(kind, of=of, total=len(view.lines)) for kind, of in facts.items() if of)
    return section("What the data cannot say", bullets(sentences))


def _concerned(view: View, concerns: Callable[[Line], Any]) -> list[str]:
    return [line.label for line in view.lines if concerns(line)]


def _of_figures(view: View, ok: Sequence[Record]) -> Facts:
    """Return the caveats of devices and of speeds: the first screen says what would rank these."""
    on_cpu = [record for record in ok if record.row.get("measured_on") == "cpu"]
    threads = {
        count: record.row["world_size"] == 1 for record in on_cpu if (count := record.environment.get("threads"))
    }
    few = [line for line in view.lines if line.speed.has_too_few_runs]
    return {
        "of_cpu": on_cpu,
        "of_one_rank": len(threads) > 1 and threads[max(threads)] and threads,
        "of_shared_cores": [run for run in ok if is_crowded(run) and run.row.get("step_seconds") is not None],
        "of_virtual_worlds": any(record.row.get("launch") == "virtual" for record in ok),
        "of_simulations": _concerned(view, lambda line: line.ok and line.get("launch") == "simulated"),
        "of_few_runs": labels_by(few, lambda line: line.speed.unranked_reason),
        "of_disturbances": _concerned(view, lambda line: line.speed.is_disturbed),
        "of_uncertain_differences": _concerned(view, lambda line: line.get("unsettled")),
    }


def _of_comparisons(view: View, ok: Sequence[Record]) -> Facts:
    """Return in what else than their strategies rows differ, and which settings speeds by DeepSpeed belong to."""
    machines = {(str(record.versions), str(record.environment.get("processor"))) for record in ok}
    zeros = [line for line in view.lines if line.ok and _is_deepspeed_zero(line)]
    has_others = sum(line.ok for line in view.lines) > 1
    return {
        "of_kernels": labels_by_kernel(view.lines),
        "of_stale_rows": _concerned(view, lambda line: line.get("stale_reason")),
        "of_several_machines": len(machines) > 1,
        "of_deepspeed_settings": has_others and view.draws_speeds and labels_by(zeros, _setting),
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


def _of_what_is_missing(view: View, ok: Sequence[Record]) -> Facts:
    """Return what was not proven, not measured or not varied."""
    real = [line for line in view.lines if line.ok and is_measured(line.row)]
    steps = sorted({(line.record.config.get("train") or {}).get("steps") or 0 for line in real} - {0})
    runs = [record for record in ok if is_measured(record.row)]
    is_on_one_node = {record.environment.get("nodes") or 1 for record in runs} == {1}
    models = {(line.row.get("model"), line.row.get("parameters")) for line in view.lines}
    launches = {line.row.get("launch") for line in view.lines}
    return {
        "of_no_reference": _concerned(view, lambda line: line in real and line.get("loss_deviation") is None),
        "of_fewer_layers": _concerned(view, lambda line: line in real and compared_layers(line.record)),
        "of_few_steps": steps and [steps, min(line.get("proven_steps") or 0 for line in real)],
        "of_failures": _concerned(view, lambda line: not line.ok),
        "of_no_memory": _concerned(view, lambda line: line.ok and line.get("peak_allocated_bytes") is None),
        "of_one_machine": is_on_one_node and any((record.row.get("world_size") or 1) > 1 for record in runs),
        "of_one_model": launches if len(models) == 1 else (),
    }


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def by_kind(causes: Iterable[tuple[str, str]], separator: str = "; ") -> dict[str, list[str]]:
    """Return the labels of rows by the kind of their causes.

    Args:
        causes: Labels with their causes. Phrases of causes that differ in a number alone are of one kind, whose text
            has the range of that number.
        separator: What joins the phrases of a cause.
    """
    kinds: dict[str, list[tuple[str, list[str]]]] = {}
    for label, cause in causes:
        for phrase in cause.split(separator):
            kinds.setdefault(_NUMBER.sub("#", phrase), []).append((label, _NUMBER.findall(phrase)))
    return {
        _with_ranges(kind, [numbers for _, numbers in entries]): list(dict.fromkeys(label for label, _ in entries))
        for kind, entries in kinds.items()
    }


def _with_ranges(kind: str, numbers: Sequence[Sequence[str]]) -> str:
    """Return the text of a kind, with a range in the place of every number that differs."""
    ranges = [span_text(sorted(set(position), key=float)) for position in zip(*numbers, strict=True)]
    first, *rest = kind.split("#")
    return first + "".join(number + text for number, text in zip(ranges, rest, strict=True))
