"""The limitations of a folder's figures, derived from the records themselves."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from harness.records.schema import Record, Row
from harness.report.comparability import is_measured
from harness.report.document import Section, bullets, section
from harness.report.frame import column_values, compared_layers, labelled, labels_by_kernel, labels_by_staleness
from harness.report.sentences import sentence
from harness.report.speeds import CROWDED, MINIMUM_RUNS, is_crowded
from harness.report.text import span_text
from harness.report.view import View


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    return section("What the data cannot say", bullets(text for kind in _KINDS for text in kind(view)))


def _concerned(view: View, kind: str, is_concerned: Callable[[Record], Any]) -> Iterator[str]:
    """Yield the sentence of a kind on the lines that it concerns, if there are any."""
    labels = [label for label, line in labelled(view.line_medians, view.lines) if is_concerned(line)]
    yield from _on_labels(view, kind, labels)


def _on_labels(view: View, kind: str, labels: Sequence[str]) -> Iterator[str]:
    if labels:
        yield sentence(kind, labels=labels, total=len(view.lines))


def _device(view: View) -> Iterator[str]:
    ok = _ok_records(view)
    on_cpu = [record for record in ok if record.row.get("measured_on") == "cpu"]
    if on_cpu:
        yield sentence("of_cpu")
    threads = {
        count: record.row["world_size"] == 1 for record in on_cpu if (count := record.environment.get("threads"))
    }
    if len(threads) > 1 and threads[max(threads)]:
        yield sentence("of_one_rank", most=max(threads), least=min(threads))
    crowded = [record for record in ok if is_crowded(record) and record.row.get("step_seconds") is not None]
    if crowded:
        ranks = max(record.row["world_size"] for record in crowded)
        cores = min(record.environment["cores"] for record in crowded)
        yield sentence("of_shared_cores", ranks=ranks, cores=cores)
    if any(record.row.get("launch") == "virtual" for record in ok):
        yield sentence("of_virtual_worlds")
    yield from _concerned(
        view, "of_simulations", lambda line: line.status == "ok" and line.row.get("launch") == "simulated"
    )


def _speeds(view: View) -> Iterator[str]:
    """Yield which speeds are not compared, and why: the first screen says what would rank them."""
    total, table = len(view.lines), view.line_medians
    by_reason: dict[str, list[str]] = {}
    for label, standing in labelled(table, view.ranking.standings):
        if standing.speed is not None and not standing.speed.is_ranked:
            by_reason.setdefault(standing.speed.unranked_reason, []).append(label)
    disturbed = by_reason.pop("disturbed", [])
    for other in ("simulated", CROWDED):  # see _device
        by_reason.pop(other, None)
    if by_reason:
        yield sentence("of_few_runs", by_reason=by_reason, minimum=MINIMUM_RUNS, total=total)
    yield from _on_labels(view, "of_disturbances", disturbed)
    unsettled = [label for label, is_so in labelled(table, column_values(table, "unsettled")) if is_so]
    yield from _on_labels(view, "of_uncertain_differences", unsettled)


def _comparable(view: View) -> Iterator[str]:
    kernels = labels_by_kernel(view.line_medians)
    if kernels:
        yield sentence("of_kernels", by_kernel=kernels, total=len(view.lines))
    stale = [label for labels in labels_by_staleness(view.line_medians).values() for label in labels]
    yield from _on_labels(view, "of_stale_rows", stale)
    machines = {(str(record.versions), str(record.environment.get("processor"))) for record in _ok_records(view)}
    if len(machines) > 1:
        yield sentence("of_several_machines")


def _deepspeed_settings(view: View) -> Iterator[str]:
    """Yield which of DeepSpeed's settings each of its speeds belongs to, where several strategies are compared."""
    ok = [(label, line) for label, line in labelled(view.line_medians, view.lines) if line.status == "ok"]
    settings: dict[str, list[str]] = {"literature": [], "default": [], "options": []}
    for label, line in ok:
        if _is_deepspeed_zero(line.row):
            settings[_setting(line)].append(label)
    used = {setting: labels for setting, labels in settings.items() if labels}
    if used and len(ok) > 1 and view.draws_speeds:
        yield sentence("of_deepspeed_settings", by_setting=used, total=len(view.lines))


def _is_deepspeed_zero(row: Row) -> bool:
    """Return whether DeepSpeed implements ZeRO in this run, also where Accelerate calls it."""
    by_deepspeed = row.get("engine") == "deepspeed"
    by_accelerate = row.get("engine") == "accelerate" and row.get("data_parallel") in (None, "none")
    return by_deepspeed or (by_accelerate and bool(row.get("zero_stage")))


def _setting(line: Record) -> str:
    """Return which settings a run by DeepSpeed has: the papers', the library's own, or others."""
    strategy = line.config.get("strategy") or {}
    if strategy.get("literature", True):
        return "literature"
    return "options" if strategy.get("options") else "default"


def _proven(view: View) -> Iterator[str]:
    def is_real(line: Record) -> bool:
        return line.status == "ok" and is_measured(line.row)

    ok = [line for line in view.lines if is_real(line)]
    yield from _concerned(
        view, "of_no_reference", lambda line: is_real(line) and line.row.get("loss_deviation") is None
    )
    yield from _concerned(view, "of_fewer_layers", lambda line: is_real(line) and compared_layers(line))
    steps = sorted({(line.config.get("train") or {}).get("steps") or 0 for line in ok} - {0})
    if steps:
        proven = [line.row.get("proven_steps") or 0 for line in ok]
        yield sentence("of_few_steps", steps=steps, proven=min(proven))


def _missing(view: View) -> Iterator[str]:
    yield from _concerned(view, "of_failures", lambda line: line.status != "ok")
    yield from _concerned(
        view, "of_no_memory", lambda line: line.status == "ok" and line.row.get("peak_allocated_bytes") is None
    )
    real = [record for record in _ok_records(view) if is_measured(record.row)]
    nodes = {record.environment.get("nodes") or 1 for record in real}
    if nodes == {1} and max(record.row.get("world_size") or 1 for record in real) > 1:
        yield sentence("of_one_machine")
    if len({(line.row.get("model"), line.row.get("parameters")) for line in view.lines}) == 1:
        is_simulated = all(line.row.get("launch") == "simulated" for line in view.lines)
        yield sentence("of_one_model", is_simulated=is_simulated)


def _ok_records(view: View) -> list[Record]:
    return [record for record in view.records if record.status == "ok"]


_KINDS = (_device, _speeds, _comparable, _deepspeed_settings, _proven, _missing)


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
