"""The limitations of a folder's figures, derived from the records themselves."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from harness.records.schema import Record, Row
from harness.report.comparability import is_measured
from harness.report.document import Section, bullets, section
from harness.report.frame import column_values, compared_layers, labelled, labels_by_kernel, labels_of
from harness.report.sentences import sentence
from harness.report.speeds import CROWDED, MINIMUM_RUNS, is_crowded
from harness.report.text import span_text
from harness.report.view import View


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    kinds = (_device, _speeds, _comparable, _deepspeed_settings, _proven, _missing)
    return section("What the data cannot say", bullets(text for kind in kinds for text in kind(view)))


def _concerned(view: View, kind: str, flags: Iterable[Any]) -> Iterator[str]:
    """Yield the sentence of a kind on the lines whose flags say that it concerns them, if there are any."""
    labels = [label for label, flag in labelled(view.line_medians, flags) if flag]
    if labels:
        yield sentence(kind, labels=labels, total=len(view.lines))


def _ok_records(view: View) -> list[Record]:
    return [record for record in view.records if record.status == "ok"]


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
    simulated = (line.status == "ok" and line.row.get("launch") == "simulated" for line in view.lines)
    yield from _concerned(view, "of_simulations", simulated)


def _speeds(view: View) -> Iterator[str]:
    """Yield which speeds are not compared, and why: the first screen says what would rank them."""
    table, speeds = view.line_medians, [standing.speed for standing in view.ranking.standings]
    reasons = [speed.unranked_reason if speed else "" for speed in speeds]
    few = [(label, reason) for label, reason in labelled(table, reasons) if reason not in ("", *_ELSEWHERE)]
    if few:
        yield sentence("of_few_runs", by_reason=labels_of(few), minimum=MINIMUM_RUNS, total=len(view.lines))
    yield from _concerned(view, "of_disturbances", (reason == "disturbed" for reason in reasons))
    yield from _concerned(view, "of_uncertain_differences", column_values(table, "unsettled"))


_ELSEWHERE = ("disturbed", "simulated", CROWDED)  # why speeds are not ranked, with a sentence of its own


def _comparable(view: View) -> Iterator[str]:
    kernels = labels_by_kernel(view.line_medians)
    if kernels:
        yield sentence("of_kernels", by_kernel=kernels, total=len(view.lines))
    yield from _concerned(view, "of_stale_rows", column_values(view.line_medians, "stale_reason"))
    machines = {(str(record.versions), str(record.environment.get("processor"))) for record in _ok_records(view)}
    if len(machines) > 1:
        yield sentence("of_several_machines")


def _deepspeed_settings(view: View) -> Iterator[str]:
    """Yield which of DeepSpeed's settings each of its speeds belongs to, where several strategies are compared."""
    ok = [(label, line) for label, line in labelled(view.line_medians, view.lines) if line.status == "ok"]
    by_setting = labels_of((label, _setting(line)) for label, line in ok if _is_deepspeed_zero(line.row))
    if by_setting and len(ok) > 1 and view.draws_speeds:
        yield sentence("of_deepspeed_settings", by_setting=by_setting, total=len(view.lines))


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
    real = [line if line.status == "ok" and is_measured(line.row) else None for line in view.lines]
    unproven = (line and line.row.get("loss_deviation") is None for line in real)
    yield from _concerned(view, "of_no_reference", unproven)
    yield from _concerned(view, "of_fewer_layers", (line and compared_layers(line) for line in real))
    ok = [line for line in real if line]
    steps = sorted({(line.config.get("train") or {}).get("steps") or 0 for line in ok} - {0})
    if steps:
        yield sentence("of_few_steps", steps=steps, proven=min(line.row.get("proven_steps") or 0 for line in ok))


def _missing(view: View) -> Iterator[str]:
    yield from _concerned(view, "of_failures", (line.status != "ok" for line in view.lines))
    uncounted = (line.status == "ok" and line.row.get("peak_allocated_bytes") is None for line in view.lines)
    yield from _concerned(view, "of_no_memory", uncounted)
    real = [record for record in _ok_records(view) if is_measured(record.row)]
    nodes = {record.environment.get("nodes") or 1 for record in real}
    if nodes == {1} and max(record.row.get("world_size") or 1 for record in real) > 1:
        yield sentence("of_one_machine")
    if len({(line.row.get("model"), line.row.get("parameters")) for line in view.lines}) == 1:
        is_simulated = all(line.row.get("launch") == "simulated" for line in view.lines)
        yield sentence("of_one_model", is_simulated=is_simulated)


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
