"""The limitations of a folder's figures, derived from the records themselves."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from harness.records.schema import Record
from harness.report.comparability import is_measured
from harness.report.document import Section, bullets, section
from harness.report.lines import Line, compared_layers, labels_by, labels_by_kernel
from harness.report.sentences import sentence
from harness.report.speeds import MINIMUM_RUNS, is_crowded
from harness.report.text import span_text
from harness.report.view import View


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    kinds = (_device, _speeds, _comparable, _deepspeed_settings, _proven, _missing)
    return section("What the data cannot say", bullets(text for kind in kinds for text in kind(view)))


def _concerned(view: View, kind: str, concerns: Callable[[Line], Any]) -> Iterator[str]:
    """Yield the sentence of a kind on the lines that it concerns, if there are any."""
    labels = [line.label for line in view.lines if concerns(line)]
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
    yield from _concerned(view, "of_simulations", lambda line: line.ok and line.get("launch") == "simulated")


def _speeds(view: View) -> Iterator[str]:
    """Yield which speeds are not compared, and why: the first screen says what would rank them."""
    few = [line for line in view.lines if line.speed.has_too_few_runs]
    if few:
        by_reason = labels_by(few, lambda line: line.speed.unranked_reason)
        yield sentence("of_few_runs", by_reason=by_reason, minimum=MINIMUM_RUNS, total=len(view.lines))
    yield from _concerned(view, "of_disturbances", lambda line: line.speed.is_disturbed)
    yield from _concerned(view, "of_uncertain_differences", lambda line: line.get("unsettled"))


def _comparable(view: View) -> Iterator[str]:
    kernels = labels_by_kernel(view.lines)
    if kernels:
        yield sentence("of_kernels", by_kernel=kernels, total=len(view.lines))
    yield from _concerned(view, "of_stale_rows", lambda line: line.get("stale_reason"))
    machines = {(str(record.versions), str(record.environment.get("processor"))) for record in _ok_records(view)}
    if len(machines) > 1:
        yield sentence("of_several_machines")


def _deepspeed_settings(view: View) -> Iterator[str]:
    """Yield which of DeepSpeed's settings each of its speeds belongs to, where several strategies are compared."""
    ok = [line for line in view.lines if line.ok]
    by_setting = labels_by(filter(_is_deepspeed_zero, ok), _setting)
    if by_setting and len(ok) > 1 and view.draws_speeds:
        yield sentence("of_deepspeed_settings", by_setting=by_setting, total=len(view.lines))


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


def _proven(view: View) -> Iterator[str]:
    real = {line for line in view.lines if line.ok and is_measured(line.row)}
    yield from _concerned(view, "of_no_reference", lambda line: line in real and line.get("loss_deviation") is None)
    yield from _concerned(view, "of_fewer_layers", lambda line: line in real and compared_layers(line.record))
    steps = sorted({(line.record.config.get("train") or {}).get("steps") or 0 for line in real} - {0})
    if steps:
        yield sentence("of_few_steps", steps=steps, proven=min(line.get("proven_steps") or 0 for line in real))


def _missing(view: View) -> Iterator[str]:
    yield from _concerned(view, "of_failures", lambda line: not line.ok)
    yield from _concerned(view, "of_no_memory", lambda line: line.ok and line.get("peak_allocated_bytes") is None)
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
