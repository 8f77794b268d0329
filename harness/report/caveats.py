"""The limitations of a folder's figures, derived from the records themselves."""

import re
from collections.abc import Iterable, Iterator, Sequence

from harness.records.schema import Record, Row
from harness.report.comparability import is_measured
from harness.report.document import Section, bullets, section
from harness.report.frame import column_values, compared_layers, labelled, labels_by_kernel, labels_by_staleness
from harness.report.speeds import CROWDED, MINIMUM_RUNS, is_crowded
from harness.report.text import pluralize, span_text
from harness.report.view import View


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    return section("What the data cannot say", bullets(sentence for kind in _KINDS for sentence in kind(view)))


def _device(view: View) -> Iterator[str]:
    ok = _ok_records(view)
    if any(record.row.get("measured_on") == "cpu" for record in ok):
        yield (
            "How fast the same layouts are on GPUs: here ranks share one memory and its bandwidth, and messages never"
            " leave the machine. A GPU's kernels and allocator also add memory that a CPU does not have."
        )
    threads = {
        int(record.environment["threads"]): record.row["world_size"] == 1
        for record in ok
        if str(record.environment.get("threads") or "").isdigit() and record.row.get("measured_on") == "cpu"
    }
    if len(threads) > 1 and threads[max(threads)]:
        yield (
            f"What more ranks than one bring: a single rank computed with {max(threads)} threads, and others with"
            f" {min(threads)}, so that all configurations had the same cores."
        )
    crowded = [record for record in ok if is_crowded(record) and record.row.get("step_seconds") is not None]
    if crowded:
        most = max(record.row["world_size"] for record in crowded)
        cores = min(record.environment["cores"] for record in crowded)
        yield (
            f"How speed scales with devices: up to {most} ranks shared {pluralize(cores, 'core')}, so that their"
            " tokens/s are those of work divided among these cores, and are neither ranked nor drawn."
        )
    if any(record.row.get("launch") == "virtual" for record in ok):
        yield (
            "How fast the worlds of launch=virtual are: one rank of each ran alone. Its memory and its computing were"
            " measured, nothing was sent, and estimated_step_seconds adds the communication that the cost model"
            " predicts. Its values were compared with nothing."
        )


def _simulated(view: View) -> Iterator[str]:
    """Yield what a simulation leaves out."""
    simulated = [line for line in view.lines if line.status == "ok" and line.row.get("launch") == "simulated"]
    if simulated:
        yield (
            "Whether these train right and how fast they are: the code of the ranks that simulate.rank chose ran on"
            " tensors without memory or values, and their times are those of a model of the device. Maxima over ranks"
            " and the proof of the layout are of these ranks. What kernels allocate for themselves, NCCL's buffers and"
            f" the CUDA context are left out: {_labels(view, simulated)}."
        )


def _speeds(view: View) -> Iterator[str]:
    """Yield which speeds are not compared, and why: the first screen says what would rank them."""
    by_reason: dict[str, list[str]] = {}
    for label, standing in labelled(view.line_medians, view.ranking.standings):
        if standing.speed is not None and not standing.speed.is_ranked:
            by_reason.setdefault(standing.speed.unranked_reason, []).append(label)
    disturbed = by_reason.pop("disturbed", [])
    by_reason.pop("simulated", [])  # _simulated says what is known of them
    by_reason.pop(CROWDED, [])  # and _device of these
    if by_reason:
        reasons = "; ".join(f"{reason}: {_some(view, labels)}" for reason, labels in by_reason.items())
        yield (
            "How these speeds vary between runs is not known, so that they are not ranked: at least"
            f" {MINIMUM_RUNS} undisturbed runs are needed. {reasons[0].upper()}{reasons[1:]}."
        )
    if disturbed:
        yield (
            f"Speeds and times of {_some(view, disturbed)}: something disturbed every run, or too few steps were timed."
            " They are in no sentence and no ranking; the causes are listed under Runs with a noise warning."
        )
    table = view.line_medians
    unsettled = [label for label, is_so in labelled(table, column_values(table, "unsettled")) if is_so]
    if unsettled:
        yield (
            "Their runs do not tell these from the baseline with certainty, so that they may be faster or slower:"
            f" {_some(view, unsettled)}."
        )


def _comparable(view: View) -> Iterator[str]:
    kernels = labels_by_kernel(view.line_medians)
    if kernels:
        uses = "; ".join(f"{kernel}: {_some(view, labels)}" for kernel, labels in kernels.items())
        yield f"Attention kernels differ, so that rows differ in more than their strategies: {uses}."
    stale = [label for labels in labels_by_staleness(view.line_medians).values() for label in labels]
    if stale:
        yield (
            "These were recorded with other versions than are installed now (run them again before comparing):"
            f" {_some(view, stale)}."
        )
    version_sets = {str(record.versions) for record in _ok_records(view)}
    hosts = {str(record.environment.get("processor")) for record in _ok_records(view)}
    if len(version_sets) > 1 or len(hosts) > 1:
        yield (
            "Not all rows were recorded with the same versions on the same kind of machine: see Versions and"
            " environment."
        )


def _deepspeed_settings(view: View) -> Iterator[str]:
    """Yield which of DeepSpeed's settings each of its speeds belongs to, where several strategies are compared."""
    ok = [line for line in view.lines if line.status == "ok"]
    labels: dict[str, str] = {}
    for settings in ("those that send the papers' volumes", "DeepSpeed's defaults", "those tuned for speed"):
        lines = [line for line in ok if _is_deepspeed_zero(line.row) and _settings(line) == settings]
        if lines:
            labels[settings] = _labels(view, lines)
    if labels and len(ok) > 1 and view.draws_speeds:
        speeds = "; ".join(f"{settings}: {names}" for settings, names in labels.items())
        yield (
            f"DeepSpeed's speed depends on its settings, which are here {speeds}. Compare the speed of other"
            " strategies with zero1_tuned, zero2_tuned and zero3_tuned, which follow DeepSpeed's documentation."
        )


def _is_deepspeed_zero(row: Row) -> bool:
    """Return whether DeepSpeed implements ZeRO in this run, also where Accelerate calls it."""
    by_deepspeed = row.get("engine") == "deepspeed"
    by_accelerate = row.get("engine") == "accelerate" and row.get("data_parallel") in (None, "none")
    return by_deepspeed or (by_accelerate and bool(row.get("zero_stage")))


def _settings(line: Record) -> str:
    """Return which settings a run by DeepSpeed has: the papers', the library's own, or others."""
    strategy = line.config.get("strategy") or {}
    if strategy.get("literature", True):
        return "those that send the papers' volumes"
    return "those tuned for speed" if strategy.get("options") else "DeepSpeed's defaults"


def _proven(view: View) -> Iterator[str]:
    ok = [line for line in view.lines if line.status == "ok" and is_measured(line.row)]
    unproven = [line for line in ok if line.row.get("loss_deviation") is None]
    if unproven:
        yield (
            "Not compared with a reference, for the reason in the column reference of runs.csv:"
            f" {_labels(view, unproven)}."
        )
    chained = [line for line in ok if compared_layers(line)]
    if chained:
        yield (
            "No single process fits the whole model of these. They were compared with another layout, which was itself"
            " compared with a single process on fewer layers, as the column reference of runs.csv tells:"
            f" {_labels(view, chained)}."
        )
    steps = sorted({(line.config.get("train") or {}).get("steps") or 0 for line in ok} - {0})
    if steps:
        proven = [line.row["proven_steps"] for line in ok if line.row.get("proven_steps")]
        proof = (
            f" The first {pluralize(min(proven), 'step')} of each, warm-up and traced steps included, are proven to be"
            " the same training."
            if len(proven) == len(ok)
            else ""
        )
        yield (
            f"{span_text(steps)} timed steps do not tell how a model converges, nor how long runs cope with failures,"
            f" checkpoints to disk and slow data loading.{proof}"
        )


def _missing(view: View) -> Iterator[str]:
    failed = [line for line in view.lines if line.status != "ok"]
    if failed:
        yield f"The speed and memory of these are not known because they did not end ok: {_labels(view, failed)}."
    unmeasured = [line for line in view.lines if line.status == "ok" and line.row.get("peak_allocated_bytes") is None]
    if unmeasured:
        yield f"Memory was not counted for {_labels(view, unmeasured)}."
    real = [record for record in _ok_records(view) if is_measured(record.row)]
    nodes = {record.environment.get("nodes") or 1 for record in real}
    worlds = {record.row.get("world_size") or 1 for record in real}
    if nodes == {1} and max(worlds, default=1) > 1:
        yield "All ranks were on one machine: the cost of the network between nodes was not measured."
    if len({(line.row.get("model"), line.row.get("parameters")) for line in view.lines}) == 1:
        verb = "simulated" if all(line.row.get("launch") == "simulated" for line in view.lines) else "trained"
        yield (
            f"One model was {verb}: which strategy is best depends on the size of the model, the batch and the sequence"
            " length."
        )


def _ok_records(view: View) -> list[Record]:
    return [record for record in view.records if record.status == "ok"]


def _labels(view: View, lines: Sequence[Record]) -> str:
    identities = {id(line) for line in lines}
    pairs = labelled(view.line_medians, view.lines)
    return _some(view, [label for label, line in pairs if id(line) in identities])


def _some(view: View, labels: Sequence[str]) -> str:
    return labels_text(labels, len(view.lines))


_KINDS = (_device, _simulated, _speeds, _comparable, _deepspeed_settings, _proven, _missing)


MOST_LABELS = 6  # that a note lists

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def labels_text(labels: Sequence[str], total: int, most: int = MOST_LABELS) -> str:
    """Return the labels of the rows that a note is about, or their number if there are many."""
    if len(labels) <= most:
        return ", ".join(labels)
    return f"all {total} configurations" if len(labels) == total else f"{len(labels)} of {total} configurations"


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
