"""The report's first section: the fastest and the smallest runs, what they cost and why, with their figures."""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.records.schema import Record
from harness.report import summary_sentences
from harness.report.comparability import choice_key, group_by
from harness.report.document import BulletList, Paragraph, Part, Section, section
from harness.report.frame import column_values, records_frame
from harness.report.group_sentences import ReportedLine, group_sentences
from harness.report.text import pluralize
from harness.report.view import View

_MOST_GROUPS = 4  # groups of comparable runs that have sentences


def findings(view: View, fits_in: int | None = None) -> list[Section]:
    """Return the section "Summary": for each group of comparable runs the fastest, the smallest and what to choose.

    Args:
        view: The runs to report.
        fits_in: The memory in bytes of the device that a recommendation is for; by default there is a recommendation
            for every size of device.
    """
    groups = _groups(view)
    largest = sorted(groups.values(), key=_weight, reverse=True)[:_MOST_GROUPS]
    parts: list[Part] = [
        *_bullets([*summary_sentences.memory_wall_sentences(view), *summary_sentences.scaling_sentences(view)])
    ]
    for rank, records in enumerate(largest):
        parts += [Paragraph(_heading(records, groups))] if len(groups) > 1 else []
        parts += _bullets(group_sentences(_lines(records), fits_in, in_full=rank == 0))
    omitted = len(groups) - len(largest)
    if omitted:
        parts.append(Paragraph(f"The tables show {pluralize(omitted, 'smaller group')} of comparable runs."))
    return section(
        "Summary",
        *parts,
        *_bullets([*summary_sentences.prediction_sentences(view), *summary_sentences.failure_sentences(view)]),
    )


def _bullets(sentences: Iterable[str]) -> list[BulletList]:
    items = [("", sentence) for sentence in sentences]
    return [BulletList(items)] if items else []


def _groups(view: View) -> dict[Any, list[Record]]:
    """Return the lines that a reader may choose between: comparable ones on as many ranks."""
    ok = [line for line in view.lines if line.status == "ok" and line.row.get("tokens_per_second")]
    groups = group_by(ok, lambda line: choice_key(line.row))
    return {key: lines for key, lines in groups.items() if len(lines) > 1}


def _weight(lines: Sequence[Record]) -> tuple[int, int]:
    """Return a key to sort groups by: the one with most lines first, of equals the one on most ranks."""
    return len(lines), lines[0].row.get("world_size") or 0


def _lines(records: Sequence[Record]) -> list[ReportedLine]:
    """Return the records under labels that distinguish them within their group."""
    table = records_frame(records)
    named = zip(column_values(table, "label"), records, column_values(table, "baseline"), strict=True)
    return [ReportedLine(label, record, baseline) for label, record, baseline in named]


def _heading(lines: Sequence[Record], groups: dict[Any, list[Record]]) -> str:
    """Return what distinguishes the group from the others."""
    formats = {
        "model": "{}",
        "parameters": "{:,} parameters",
        "precision": "{}",
        "global_batch": "global batch {}",
        "seq_len": "sequence length {}",
        "measured_on": "on {}",
        "world_size": "world size {}",
    }
    differing = [name for name in formats if len({group[0].row.get(name) for group in groups.values()}) > 1]
    row = lines[0].row
    known = [formats[name].format(row[name]) for name in differing if row.get(name) is not None]
    return f"For {', '.join(known) or 'a further setting'}:"
