"""The limits of what the figures of a folder say, derived from the records themselves."""

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
    return section("What these figures cannot say", BulletList(items) if items else None)


def _device(view: View) -> Iterator[str]:
    ok = _ok_records(view)
    if any(record.row.get("measured_on") == "cpu" for record in ok):
        yield (
            "Speeds of CPU processes say little of GPUs: ranks share one memory and its bandwidth, and messages never"
            " leave the machine. Bytes held and sent, operations and losses are what the same layout has anywhere, but"
            " for what kernels and allocators of a GPU add."
        )
    crowded = [record for record in ok if _is_crowded(record)]
    if crowded:
        most = max(record.row["world_size"] for record in crowded)
        cores = min(record.environment["cores"] for record in crowded)
        yield (
            f"Up to {most} ranks shared {pluralize(cores, 'core')}: their tokens/s hold for work divided among those,"
            " and say nothing of how more devices would scale."
        )
    if any(record.row.get("launch") == "virtual" for record in ok):
        yield "Runs of the virtual launch play one rank of a larger world: nothing was sent, and no speed is claimed."


def _is_crowded(record: Record) -> bool:
    """Return whether the ranks computed on the processor with less than one core each."""
    cores, world = record.environment.get("cores"), record.row.get("world_size")
    return record.row.get("measured_on") == "cpu" and cores is not None and world is not None and cores < world


def _repeats(view: View) -> Iterator[str]:
    ok = [line for line in view.lines if line.status == "ok"]
    alone = [line for line in ok if line.row.get("between_runs") is None]
    if alone and len(alone) == len(ok):
        yield "Every line is one run: how runs differ is unknown, the spread is of its steps (repeats=3)."
    elif alone:
        labels = _labels(view, alone)
        yield f"One run alone stands for {labels}: its spread is of its steps (repeats=3)."
    if any(spread(line.row) is None for line in ok):
        yield "Of some lines too few steps were timed to tell how sure their speed is: sentences leave it out."
    unsettled = [label for label, is_unsettled in _pairs(view, "unsettled") if is_unsettled]
    if unsettled:
        yield f"The spreads leave open whether faster or slower than what they are held against: {_some(unsettled)}."


def _disturbed(view: View) -> Iterator[str]:
    disturbed = [label for label, cause in _pairs(view, "noise_warning") if cause]
    if disturbed:
        yield f"Something disturbed the times of {_some(disturbed)}; what, stands under Disturbed runs."


def _comparable(view: View) -> Iterator[str]:
    kernels = labels_by_kernel(view.line_medians)
    if kernels:
        uses = "; ".join(f"{kernel}: {_some(labels)}" for kernel, labels in kernels.items())
        yield f"Attention ran as more than one kernel, so that more differs than the strategies: {uses}."
    stale = [label for labels in labels_by_staleness(view.line_medians).values() for label in labels]
    if stale:
        yield f"Other versions than those installed now made {_some(stale)} (run again before comparing)."
    version_sets = {str(record.versions) for record in _ok_records(view)}
    hosts = {str(record.environment.get("processor")) for record in _ok_records(view)}
    if len(version_sets) > 1 or len(hosts) > 1:
        yield "Not all rows were made by the same versions on the same kind of machine: see Versions and environment."


def _proven(view: View) -> Iterator[str]:
    ok = [line for line in view.lines if line.status == "ok"]
    unproven = [line for line in ok if line.row.get("loss_deviation") is None]
    if unproven:
        yield f"Not compared with a single-process reference: {_labels(view, unproven)}."
    steps = sorted({(line.config.get("train") or {}).get("steps") or 0 for line in ok} - {0})
    if steps:
        count = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        yield (
            f"{count} timed steps prove that the same training ran; they say nothing of how a model converges, nor of"
            " what long runs meet: failures, checkpoints to disk, data that comes slowly."
        )


def _missing(view: View) -> Iterator[str]:
    failed = [line for line in view.lines if line.status != "ok"]
    if failed:
        yield f"Nothing is known of the speed and memory of what did not end well: {_labels(view, failed)}."
    unmeasured = [line for line in view.lines if line.status == "ok" and line.row.get("peak_allocated_bytes") is None]
    if unmeasured:
        yield f"Memory was not counted for {_labels(view, unmeasured)}."
    nodes = {record.environment.get("nodes") or 1 for record in _ok_records(view)}
    worlds = {record.row.get("world_size") or 1 for record in _ok_records(view)}
    if nodes == {1} and max(worlds, default=1) > 1:
        yield "All ranks were on one machine: what the network between nodes costs was not measured."
    if len({line.row.get("model") for line in view.lines}) == 1 and view.lines:
        yield "One model was trained: which strategy wins changes with its size, the batch and the length of sequences."


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
