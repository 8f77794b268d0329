"""The report's findings: configurations beside the baseline, the memory wall, scaling, checkpointing, predictions."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from harness.records.plan_validation import read_plan_validation
from harness.records.run_folder import ComparisonFolder
from harness.report.answers import answers, speed_beside
from harness.report.charts.series import by_parameters, by_world
from harness.report.claim_peers import Claim
from harness.report.claims import claims
from harness.report.comparability import PARTITION_COLUMNS, comparability_key, group_by, is_measured
from harness.report.document import BulletList, Paragraph, Part, Section, bullets, section
from harness.report.lines import Line
from harness.report.ranking import Group
from harness.report.sentences import sentence
from harness.report.speeds import are_alike
from harness.report.view import View

_MOST_GROUPS = 4  # groups of comparable configurations that have sentences

MOST_SENTENCES = 8  # on the configurations of a group

_MOST_LINES = 6  # that have a sentence each

_MOST_SIZES = 3  # of models that a sentence lists: the largest, and the smallest


def findings(view: View) -> list[Section]:
    """Return the section with the sentences that the first screen has no place for."""
    groups = view.largest_groups(_MOST_GROUPS)
    parts: list[Part] = []
    for position, group in enumerate(groups):
        items = [("", text) for text in group_sentences(group)] if position == 0 else list(answers(group))
        heading = group.title[:1].upper() + group.title[1:]
        parts += [Paragraph(f"{heading}:")] if heading and items else []
        parts += [BulletList(items)] if items else []
    omitted = sum(len(group.members) > 1 for group in view.groups) - len(groups)
    if omitted:
        parts.append(Paragraph(sentence("smaller_groups", count=omitted)))
    general = [*islice(scaling_sentences(view), MOST_SENTENCES), *general_sentences(view)]
    return section("Findings", *parts, bullets(general))


def group_sentences(group: Group) -> Iterator[str]:
    """Yield the sentences on one group."""
    yield from _against_baseline(group)
    yield from islice(checkpointing_sentences(group), MOST_SENTENCES)
    calm = [line for line in group.members if not (line.speed.is_disturbed or line.speed.is_crowded)]
    bubbles = [(line, line.row.get("pipeline_bubble"), line.row.get("pipeline_bubble_theory")) for line in calm]
    known = [entry for entry in bubbles if None not in entry]
    if known:
        yield sentence("bubbles", bubbles=known[:MOST_SENTENCES])


def _against_baseline(group: Group) -> Iterator[str]:
    """Yield the memory, speed and bytes of each configuration beside the baseline's, if both checkpoint alike."""
    base = group.baseline
    if base is None:
        return
    kind = base.row.get("checkpointing")
    compared = [line for line in group.members if line is not base and line.row.get("checkpointing") == kind]
    is_ddp = base.row.get("strategy") == "ddp"  # which the papers' figures are relative to
    group_claims = claims(group.members) if is_ddp else []
    for line in compared[:MOST_SENTENCES]:
        if text := beside(line, base, [claim for claim in group_claims if claim.label == line.label]):
            yield text
    if len(compared) > MOST_SENTENCES:
        yield sentence("more_in_tables", count=len(compared) - MOST_SENTENCES)


def beside(line: Line, base: Line, own_claims: Sequence[Claim]) -> str:
    """Return the figures of a configuration beside the baseline's; empty where none is known.

    What a paper says stands behind the figure that it is about: the bytes sent, and the model state.
    """
    subjects = {claim.subject: claim for claim in reversed(own_claims)}
    volume, state = subjects.get("bytes sent"), subjects.get("model state")
    speed = speed_beside(line, base, is_named=False)
    sent, base_sent = line.row.get("communication_bytes"), base.row.get("communication_bytes")
    figures = [
        sentence("peak_beside", line=line, base=base) if line.peak is not None and base.peak else "",
        speed,
        sentence("sent_beside", times=sent / base_sent, claim=volume) if sent is not None and base_sent else "",
        sentence("state_beside", claim=state) if state else "",
    ]
    return sentence("beside", line=line, base=base, figures=list(filter(None, figures))) if any(figures) else ""


def memory_wall(view: View) -> str:
    """Return the largest model that each strategy trained within the memory limit; empty if none ran out of memory."""
    curves = by_parameters(view.lines)
    points = [line for series in curves for line in series.points]
    limits, worlds = ({line.row.get(name) for line in points} for name in ("memory_limit_bytes", "world_size"))
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None or len(worlds) != 1 or all(line.ok for line in points):
        return ""
    largest = {
        series.label: max((line.row["parameters"] for line in series.points if line.ok), default=0) for series in curves
    }
    sizes = sorted(group_by(largest, largest.get).items(), reverse=True)
    is_cut = len(sizes) > _MOST_SIZES
    sizes = [*sizes[: _MOST_SIZES - 1], sizes[-1]] if is_cut else sizes
    return sentence("memory_wall", limit=limit, sizes=sizes, is_cut=is_cut)


def scaling_sentences(view: View) -> Iterator[str]:
    """Yield how the speed of each strategy grows with the ranks, the batch and all else being equal.

    There is no sentence where ranks shared processor cores, which no device does, or where a speed is not ranked.
    """
    curves = [series for series in by_world(view.lines) if series.points[0].row.get("checkpointing") in (None, "none")]
    if len({comparability_key(series.points[0].row) for series in curves}) != 1:  # sentences would mix several settings
        return
    for series in curves[:_MOST_LINES]:
        ranked = [(line.row["world_size"], line.speed) for line in series.points if line.speed.is_ranked]
        if len(ranked) > 1:
            (few, slow), *_, (many, fast) = ranked
            times = None if are_alike(slow, fast) else fast.median / slow.median
            yield sentence("scaling", name=series.label, few=few, many=many, times=times)


def checkpointing_sentences(group: Group) -> Iterator[str]:
    """Yield how much memory each kind of checkpointing saves over the same run without, and what that costs."""
    for line, plain, cost in _checkpointed(group):
        sizes = {"activations": "activation_bytes", "the peak": "peak_allocated_bytes"}
        pairs = {noun: (line.row.get(name), plain.row.get(name)) for noun, name in sizes.items()}
        shares = {noun: new / old for noun, (new, old) in pairs.items() if new is not None and old}
        if shares:
            yield sentence("checkpointing", line=line, plain=plain, shares=shares, cost=cost)


def checkpointing_answer(group: Group) -> str:
    """Return what each kind of checkpointing saves of one configuration's peak: of the one that has the most kinds."""
    saved = [entry for entry in _checkpointed(group) if entry[0].peak and entry[1].peak]
    kinds = group_by(saved, lambda entry: entry[1].label)
    return sentence("checkpointing_saves", kinds=max(kinds.values(), key=len)) if kinds else ""


def _checkpointed(group: Group) -> Iterator[tuple[Line, Line, str]]:
    """Yield every configuration that checkpoints, with the same one that does not, and what checkpointing costs it."""

    def is_plain(line: Line) -> bool:
        return line.row.get("checkpointing") in (None, "none")

    plains = {_key(line): line for line in reversed(group.members) if is_plain(line)}
    for line in group.members:
        plain = plains.get(_key(line))
        if plain and not is_plain(line):
            yield line, plain, _cost(line, plain)


def _cost(line: Line, plain: Line) -> str:
    """Return the speed and the operations that checkpointing costs; empty where neither is known."""
    is_ranked = line.speed.is_ranked and plain.speed.is_ranked
    is_alike = is_ranked and are_alike(line.speed, plain.speed)
    speed = line.speed.median / plain.speed.median if is_ranked else None
    before, after = plain.row.get("executed_flops"), line.row.get("executed_flops")
    operations = after / before if before and after and after > before else None
    return sentence("checkpointing_cost", speed=speed, is_alike=is_alike, operations=operations)


def _key(line: Line) -> tuple[Any, ...]:
    """Return a key that is equal for configurations that differ in checkpointing alone."""
    return tuple(line.row.get(name) for name in (*PARTITION_COLUMNS, "micro_batch", "offload_activations"))


def general_sentences(view: View) -> Iterator[str]:
    """Yield how far predicted peaks are from measured ones, whether plans were right, and how many runs failed."""
    rows = [line.row for line in view.lines if line.status == "ok" and is_measured(line.row)]
    pairs = [(row.get("predicted_peak_bytes"), row.get("peak_allocated_bytes")) for row in rows]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted is not None and measured]
    if errors:
        yield sentence("prediction", count=len(errors), median=statistics.median(errors), largest=max(errors))
    yield from validation_sentences(view)
    failed = Counter(line.status for line in view.lines if line.status != "ok")
    if failed:
        yield sentence("failures", statuses=failed, total=len(view.lines))


def validation_sentences(view: View) -> Iterator[str]:
    """Yield whether the predicted winner of a sweep won, for each folder whose sweep validated its plan."""
    for folder in dict.fromkeys(path.parent for path in view.folders.values()):
        validation = read_plan_validation(ComparisonFolder(folder))
        if validation is not None:
            yield validation.sentence()
