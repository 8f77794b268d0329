"""The limitations of a folder's figures, derived from the records themselves."""

from collections.abc import Iterator, Sequence

from harness.records.schema import Record
from harness.report.document import BulletList, Section, section
from harness.report.frame import column_values, labels_by_kernel, labels_by_staleness
from harness.report.spread import spread
from harness.report.text import pluralize
from harness.report.view import View

_MOST_NAMES = 8  # labels that a sentence lists


def caveats(view: View) -> list[Section]:
    """Return the section with a sentence for each caveat, and what would remove it where something can."""
    items = [("", sentence) for kind in _KINDS for sentence in kind(view)]
    return section("Limitations", BulletList(items) if items else None)


def _device(view: View) -> Iterator[str]:
    ok = _ok_records(view)
    if any(record.row.get("measured_on") == "cpu" for record in ok):
        yield (
            "The speed of CPU processes tells little about GPUs: the ranks share one memory and its bandwidth, and"
            " messages never leave the machine. The bytes stored and sent, the operations and the losses are those of"
            " the same layout on any device, apart from what the kernels and allocators of a GPU add."
        )
    crowded = [record for record in ok if _is_crowded(record)]
    if crowded:
        most = max(record.row["world_size"] for record in crowded)
        cores = min(record.environment["cores"] for record in crowded)
        yield (
            f"Up to {most} ranks shared {pluralize(cores, 'core')}: their tokens/s are those of work divided among"
            " these cores, and do not tell how more devices would scale."
        )
    if any(record.row.get("launch") == "virtual" for record in ok):
        yield (
            "Runs with the virtual launch execute one rank of a larger world: nothing was sent, and their speed is not"
            " that of the whole world."
        )


def _is_crowded(record: Record) -> bool:
    """Return whether the ranks computed on the processor with less than one core each."""
    cores, world = record.environment.get("cores"), record.row.get("world_size")
    return record.row.get("measured_on") == "cpu" and cores is not None and world is not None and cores < world


def _repeats(view: View) -> Iterator[str]:
    ok = [line for line in view.lines if line.status == "ok"]
    alone = [line for line in ok if line.row.get("between_runs") is None]
    if alone and len(alone) == len(ok):
        yield (
            "Every configuration ran once: how runs differ is not known, and the spread is that of the steps. Repeat"
            " them for the spread between runs (repeats=3)."
        )
    elif alone:
        labels = _labels(view, alone)
        yield f"These ran once, so that their spread is that of their steps (repeats=3): {labels}."
    if any(spread(line.row) is None for line in ok):
        yield "For some configurations too few steps were timed to know the spread; the summary leaves their speed out."
    unsettled = [label for label, is_unsettled in _pairs(view, "unsettled") if is_unsettled]
    if unsettled:
        yield (
            "The spread is larger than the difference, so that these may be faster or slower than their baseline:"
            f" {_some(unsettled)}."
        )


def _disturbed(view: View) -> Iterator[str]:
    disturbed = [label for label, cause in _pairs(view, "noise_warning") if cause]
    if disturbed:
        yield f"The times have a noise warning, listed under Runs with a noise warning, for {_some(disturbed)}."


def _comparable(view: View) -> Iterator[str]:
    kernels = labels_by_kernel(view.line_medians)
    if kernels:
        uses = "; ".join(f"{kernel}: {_some(labels)}" for kernel, labels in kernels.items())
        yield f"Attention kernels differ, so that rows differ in more than their strategies: {uses}."
    stale = [label for labels in labels_by_staleness(view.line_medians).values() for label in labels]
    if stale:
        yield (
            "These were recorded with other versions than are installed now (run them again before comparing):"
            f" {_some(stale)}."
        )
    version_sets = {str(record.versions) for record in _ok_records(view)}
    hosts = {str(record.environment.get("processor")) for record in _ok_records(view)}
    if len(version_sets) > 1 or len(hosts) > 1:
        yield (
            "Not all rows were recorded with the same versions on the same kind of machine: see Versions and"
            " environment."
        )


def _proven(view: View) -> Iterator[str]:
    ok = [line for line in view.lines if line.status == "ok"]
    unproven = [line for line in ok if line.row.get("loss_deviation") is None]
    if unproven:
        yield f"Not compared with a single-process reference: {_labels(view, unproven)}."
    steps = sorted({(line.config.get("train") or {}).get("steps") or 0 for line in ok} - {0})
    if steps:
        count = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        yield (
            f"{count} timed steps prove that all strategies ran the same training; they do not tell how a model"
            " converges, nor how long runs cope with failures, checkpoints to disk and slow data loading."
        )


def _missing(view: View) -> Iterator[str]:
    failed = [line for line in view.lines if line.status != "ok"]
    if failed:
        yield f"The speed and memory of these are not known because they did not end ok: {_labels(view, failed)}."
    unmeasured = [line for line in view.lines if line.status == "ok" and line.row.get("peak_allocated_bytes") is None]
    if unmeasured:
        yield f"Memory was not counted for {_labels(view, unmeasured)}."
    nodes = {record.environment.get("nodes") or 1 for record in _ok_records(view)}
    worlds = {record.row.get("world_size") or 1 for record in _ok_records(view)}
    if nodes == {1} and max(worlds, default=1) > 1:
        yield "All ranks were on one machine: the cost of the network between nodes was not measured."
    if len({line.row.get("model") for line in view.lines}) == 1 and view.lines:
        yield (
            "One model was trained: which strategy is best depends on the size of the model, the batch and the sequence"
            " length."
        )


def _ok_records(view: View) -> list[Record]:
    return [record for record in view.records if record.status == "ok"]


def _pairs(view: View, name: str) -> list[tuple[str, object]]:
    return list(zip(column_values(view.line_medians, "label"), column_values(view.line_medians, name), strict=True))


def _labels(view: View, lines: Sequence[Record]) -> str:
    identities = {id(line) for line in lines}
    labels = column_values(view.line_medians, "label")
    return _some([label for label, line in zip(labels, view.lines, strict=True) if id(line) in identities])


def _some(labels: Sequence[str]) -> str:
    rest = len(labels) - _MOST_NAMES
    return ", ".join(labels[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


_KINDS = (_device, _repeats, _disturbed, _comparable, _proven, _missing)
