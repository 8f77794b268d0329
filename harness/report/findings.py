"""The report's section of findings: every configuration beside the baseline, other groups, scaling and predictions."""

from collections.abc import Iterator, Sequence
from itertools import islice

from harness.report.answers import answers, speed_beside
from harness.report.claim_peers import Claim
from harness.report.claims import claims
from harness.report.document import BulletList, Paragraph, Part, Section, bullets, section
from harness.report.reported import Reported, ReportedGroup, reported_groups
from harness.report.sentences import sentence
from harness.report.summary_sentences import checkpointing_sentences, general_sentences, scaling_sentences
from harness.report.view import View

_MOST_GROUPS = 4  # groups of comparable configurations that have sentences


def findings(view: View) -> list[Section]:
    """Return the section with the sentences that the first screen has no place for."""
    groups = reported_groups(view, _MOST_GROUPS)
    parts: list[Part] = []
    for position, group in enumerate(groups):
        items = [("", text) for text in group_sentences(group)] if position == 0 else list(answers(group))
        heading = group.title[:1].upper() + group.title[1:]
        parts += [Paragraph(f"{heading}:")] if heading and items else []
        parts += [BulletList(items)] if items else []
    omitted = sum(len(group.members) > 1 for group in view.ranking.groups) - len(groups)
    if omitted:
        parts.append(Paragraph(sentence("smaller_groups", count=omitted)))
    general = [*islice(scaling_sentences(view), MOST_SENTENCES), *general_sentences(view)]
    return section("Findings", *parts, bullets(general))


MOST_SENTENCES = 8  # on the configurations of a group


def group_sentences(group: ReportedGroup) -> Iterator[str]:
    """Yield the sentences on one group."""
    yield from _against_baseline(group)
    yield from islice(checkpointing_sentences(group), MOST_SENTENCES)
    calm = [line for line in group.members if not (line.speed.is_disturbed or line.speed.is_crowded)]
    bubbles = [(line, line.row.get("pipeline_bubble"), line.row.get("pipeline_bubble_theory")) for line in calm]
    known = [entry for entry in bubbles if None not in entry]
    if known:
        yield sentence("bubbles", bubbles=known[:MOST_SENTENCES])


def _against_baseline(group: ReportedGroup) -> Iterator[str]:
    """Yield the memory, speed and bytes of each configuration beside the baseline's, if both checkpoint alike."""
    base = group.baseline
    if base is None:
        return
    kind = base.row.get("checkpointing")
    compared = [line for line in group.members if line is not base and line.row.get("checkpointing") == kind]
    is_ddp = base.row.get("strategy") == "ddp"  # which the papers' figures are relative to
    labels = [line.label for line in group.members]
    group_claims = claims([line.record for line in group.members], labels) if is_ddp else []
    for line in compared[:MOST_SENTENCES]:
        if text := beside(line, base, [claim for claim in group_claims if claim.label == line.label]):
            yield text
    if len(compared) > MOST_SENTENCES:
        yield sentence("more_in_tables", count=len(compared) - MOST_SENTENCES)


def beside(line: Reported, base: Reported, own_claims: Sequence[Claim]) -> str:
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
