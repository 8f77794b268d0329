"""The report's section of findings: every configuration beside the baseline, other groups, scaling and predictions."""

from collections.abc import Iterable

from harness.report import summary_sentences
from harness.report.answers import answers
from harness.report.document import BulletList, Paragraph, Part, Section, section
from harness.report.group_sentences import MOST_SENTENCES, group_sentences
from harness.report.reported import reported_groups
from harness.report.text import pluralize
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
    return section("Findings", *parts, *_bullets(general))


def _bullets(sentences: Iterable[str]) -> list[BulletList]:
    items = [("", sentence) for sentence in sentences]
    return [BulletList(items)] if items else []
