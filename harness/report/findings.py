"""The report's findings: configurations beside the baseline, the memory wall, scaling, checkpointing, predictions."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from harness.records.plan_validation import read_plan_validation
from harness.records.run_folder import ComparisonFolder
from harness.report.answers import answers, lead
from harness.report.charts.curves import by_parameters, by_world
from harness.report.claims import Claim, claims
from harness.report.comparability import PARTITION_COLUMNS, comparability_key, group_by, is_measured
from harness.report.document import BulletList, Paragraph, Part, Section, bullets, section
from harness.report.lines import Line, shared_value
from harness.report.ranking import Group
from harness.report.text import sentence
from harness.report.view import View

MOST_SENTENCES = 8  # on the configurations of a group

_MOST_LINES = 6  # that have a sentence each

_MOST_SIZES = 3  # of models that a sentence lists: the largest, and the smallest


def findings(view: View) -> list[Section]:
    """Return the section with the sentences that the first screen has no place for."""
    groups = view.largest_groups
    parts: list[Part | None] = []
    for group in groups:
        texts = [("", text) for text in group_sentences(group) if text]
        if group is not groups[0]:
            texts = [(lead(kind, group.title), text) for kind, text in answers(group).items()]
        heading = Paragraph(sentence("heading", group=group)) if group.title else None
        parts += [heading, BulletList(texts)] if texts else []
    omitted = sum(len(group.members) > 1 for group in view.groups) - len(groups)
    parts += [Paragraph(sentence("smaller_groups", count=omitted))] if omitted else []
    general = [*islice(scaling_sentences(view), MOST_SENTENCES), *general_sentences(view)]
    return section("Findings", *parts, bullets(general))


def group_sentences(group: Group) -> Iterator[str]:
    """Yield the sentences on one group."""
    yield from _against_baseline(group)
    known = (fact for fact in checkpointed(group) if {fact["peak"], fact["activations"]} != {None})
    yield from (sentence("checkpointing", **fact) for fact in islice(known, MOST_SENTENCES))
    bubbles = ("pipeline_bubble", "pipeline_bubble_theory")
    pipelines = [line for line in group.members if line.is_timed and None not in map(line.get, bubbles)]
    if pipelines:
        yield sentence("bubbles", lines=pipelines[:MOST_SENTENCES])


def _against_baseline(group: Group) -> Iterator[str]:
    """Yield the memory, speed and bytes of each configuration beside the baseline's, if both checkpoint alike."""
    base = group.baseline
    if base is None:
        return
    kind = base.get("checkpointing")
    compared = [line for line in group.members if line is not base and line.get("checkpointing") == kind]
    known_claims = claims(group.members) if base.get("strategy") == "ddp" else []  # papers' figures are relative to ddp
    for line in compared[:MOST_SENTENCES]:
        yield beside(line, base, [claim for claim in known_claims if claim.label == line.label])
    if len(compared) > MOST_SENTENCES:
        yield sentence("more_in_tables", count=len(compared) - MOST_SENTENCES)


def beside(line: Line, base: Line, own_claims: Sequence[Claim]) -> str:
    """Return the figures of a configuration beside the baseline's; empty where none is known.

    What a paper says stands behind the figure that it is about: the bytes sent, and the model state.
    """
    by_subject = {claim.subject: claim for claim in reversed(own_claims)}
    figures = {
        "peak": line.ratio("peak_allocated_bytes", base),
        "speed": line.times_as_fast(base),
        "sent": line.ratio("communication_bytes", base),
        "state": by_subject.get("model state"),
    }
    is_known = any(figure is not None for figure in figures.values())
    return sentence("beside", line=line, base=base, volume=by_subject.get("bytes sent"), **figures) if is_known else ""


def largest_models(view: View) -> dict[str, Any]:
    """Return the memory limit, and by their sizes the largest models that strategies trained in it, with their labels.

    The largest size comes first; 0 is of strategies that trained none. It is empty if none ran out of memory.
    """
    curves = by_parameters(view.lines)
    points = [line for series in curves for line in series.points]
    limit, world = (shared_value(points, name) for name in ("memory_limit_bytes", "world_size"))
    if None in (limit, world) or all(line.ok for line in points):
        return {}
    largest = {
        series.label: max((line.row["parameters"] for line in series.points if line.ok), default=0) for series in curves
    }
    return {"limit": limit, "sizes": sorted(group_by(largest, largest.get).items(), reverse=True)}


def memory_wall(view: View) -> str:
    """Return the largest model that each strategy trained within the memory limit; empty if none ran out of memory."""
    models = largest_models(view)
    if not models:
        return ""
    sizes = models["sizes"]
    shown = sizes if len(sizes) <= _MOST_SIZES else [*sizes[: _MOST_SIZES - 1], sizes[-1]]
    return sentence("memory_wall", limit=models["limit"], sizes=shown, is_cut=shown is not sizes)


def scaling_sentences(view: View) -> Iterator[str]:
    """Yield how the speed of each strategy grows with the ranks, the batch and all else being equal.

    There is no sentence where ranks shared processor cores, which no device does, or where a speed is not ranked.
    """
    curves = [series for series in by_world(view.lines) if not series.points[0].checkpoints]
    if len({comparability_key(series.points[0].row) for series in curves}) != 1:  # sentences would mix several settings
        return
    for series in curves[:_MOST_LINES]:
        ranked = [line for line in series.points if line.speed.is_ranked]
        if len(ranked) > 1:
            times = ranked[-1].times_as_fast(ranked[0])
            yield sentence("scaling", name=series.label, few=ranked[0], many=ranked[-1], times=times)


def checkpointing_answer(group: Group) -> str:
    """Return what each kind of checkpointing saves of one configuration's peak: of the one that has the most kinds."""
    kinds = group_by(filter(itemgetter("peak"), checkpointed(group)), itemgetter("plain"))
    return sentence("checkpointing_saves", kinds=max(kinds.values(), key=len)) if kinds else ""


def checkpointed(group: Group) -> list[dict[str, Any]]:
    """Return every configuration that checkpoints, beside the same one that does not: what that saves and costs."""
    plains = {_key(line): line for line in reversed(group.members) if not line.checkpoints}
    pairs = [(line, plains.get(_key(line))) for line in group.members if line.checkpoints]
    return [
        {
            "line": line,
            "plain": plain,
            "activations": line.ratio("activation_bytes", plain),
            "peak": line.ratio("peak_allocated_bytes", plain),
            "speed": line.times_as_fast(plain),
            "operations": line.ratio("executed_flops", plain),
        }
        for line, plain in pairs
        if plain
    ]


def _key(line: Line) -> tuple[Any, ...]:
    """Return a key that is equal for configurations that differ in checkpointing alone."""
    return tuple(map(line.get, (*PARTITION_COLUMNS, "micro_batch", "offload_activations")))


def general_sentences(view: View) -> Iterator[str]:
    """Yield how far predicted peaks are from measured ones, whether plans were right, and how many runs failed."""
    measured = [line for line in view.lines if line.ok and is_measured(line.row)]
    pairs = [(line.get("predicted_peak_bytes"), line.get("peak_allocated_bytes")) for line in measured]
    errors = [abs(predicted / peak - 1) for predicted, peak in pairs if predicted is not None and peak]
    if errors:
        yield sentence("prediction", errors=errors, median=statistics.median(errors))
    yield from validation_sentences(view)
    failed = Counter(line.status for line in view.lines if not line.ok)
    if failed:
        yield sentence("failures", statuses=failed, total=len(view.lines))


def validation_sentences(view: View) -> Iterator[str]:
    """Yield whether the predicted winner of a sweep won, for each folder whose sweep validated its plan."""
    folders = dict.fromkeys(path.parent for path in view.folders.values())
    validations = (read_plan_validation(ComparisonFolder(folder)) for folder in folders)
    return (validation.sentence() for validation in validations if validation is not None)
