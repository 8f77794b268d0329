"""The report's section of findings: every configuration beside the baseline, other groups, scaling and predictions."""

from collections.abc import Iterator, Sequence
from itertools import islice

from harness.report import summary_sentences
from harness.report.answers import answers, times_text
from harness.report.claim_peers import Claim
from harness.report.claims import claims
from harness.report.document import BulletList, Paragraph, Part, Section, bullets, section
from harness.report.reported import Reported, ReportedGroup, reported_groups, share_text
from harness.report.summary_sentences import checkpointing_sentences, pipeline_texts
from harness.report.text import format_ratios, join_words, pluralize
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
        parts.append(Paragraph(f"The tables show {pluralize(omitted, 'smaller group')} of comparable configurations."))
    general = [
        *list(summary_sentences.scaling_sentences(view))[:MOST_SENTENCES],
        *summary_sentences.prediction_sentences(view),
        *summary_sentences.validation_sentences(view),
        *summary_sentences.failure_sentences(view),
    ]
    return section("Findings", *parts, bullets(general))


MOST_SENTENCES = 8  # on the configurations of a group


def group_sentences(group: ReportedGroup) -> Iterator[str]:
    """Yield the sentences on one group."""
    yield from _against_baseline(group)
    yield from islice(checkpointing_sentences(group), MOST_SENTENCES)
    pipelines = list(pipeline_texts(group.members))
    if pipelines:
        yield f"Idle over working time of the pipelines: {join_words(pipelines[:MOST_SENTENCES])}."


def _against_baseline(group: ReportedGroup) -> Iterator[str]:
    """Yield the memory, speed and bytes of each configuration beside the baseline's, if both checkpoint alike.

    What a paper says stands behind the figure that it is about: the bytes sent, and the model state.
    """
    base = group.baseline
    if base is None:
        return
    kind = base.row.get("checkpointing")
    compared = [line for line in group.members if line is not base and line.row.get("checkpointing") == kind]
    is_ddp = base.row.get("strategy") == "ddp"  # which the papers' figures are relative to
    labels = [line.label for line in group.members]
    group_claims = claims([line.record for line in group.members], labels) if is_ddp else []
    for line in compared[:MOST_SENTENCES]:
        parts = list(figures(line, base, [claim for claim in group_claims if claim.label == line.label]))
        if parts:
            yield f"{line.label} beside {base.label}: {'; '.join(parts)}."
    if len(compared) > MOST_SENTENCES:
        yield f"The tables have {len(compared) - MOST_SENTENCES} more."


def figures(line: Reported, base: Reported, own_claims: Sequence[Claim]) -> Iterator[str]:
    """Yield a phrase for each figure of a configuration."""
    if line.peak is not None and base.peak:
        yield f"{share_text(line.peak, base.peak)} of its peak memory"
    if speed := times_text(line, base):
        yield speed.replace(f" of {base.label}", "").replace(f" from {base.label}", "")
    sent, base_sent = line.row.get("communication_bytes"), base.row.get("communication_bytes")
    if sent is not None and base_sent:
        yield f"{format_ratios([sent / base_sent])[0]} × its bytes sent{_paper_text(own_claims, 'bytes sent')}"
    state = next((claim for claim in own_claims if claim.subject == "model state"), None)
    if state is not None:
        yield f"{1 / state.measured:.2f} × its model state{_paper_text(own_claims, 'model state')}"


def _paper_text(own_claims: Sequence[Claim], subject: str) -> str:
    """Return what the paper expects of the figure before it, and why they differ; empty where there is no claim."""
    claim = next((claim for claim in own_claims if claim.subject == subject), None)
    if claim is None:
        return ""
    expected = 1 / claim.expected if subject == "model state" else claim.expected
    reason = f", different: {claim.reason}" if claim.reason and not claim.agrees else ""
    return f" (by the paper's formula {expected:.2f} ×{'' if claim.agrees else reason or ', different'})"
