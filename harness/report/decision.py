"""The title of a report, and the sentence that decides: what to take for speed and for memory, and on what it holds."""

import math
from collections import Counter
from collections.abc import Sequence

from harness.records.schema import Record
from harness.report.answers import remedy
from harness.report.comparability import choice_key, group_by
from harness.report.findings import largest_models, scaling_sentences
from harness.report.lines import column_values, distinct_values, least
from harness.report.ranking import Group
from harness.report.text import sentence
from harness.report.view import View


def title(view: View) -> str:
    """Return what was compared, for which model, on what, and when; empty where nothing ran."""
    lines = view.lines
    names = ("strategy", "model", "parameters", "world_size", "measured_on", "launch")
    values = {name: distinct_values(lines, name) for name in names}
    is_untimed = not view.draws_speeds and any(line.ok for line in lines)
    return sentence("title", lines=lines, days=days(view.records), is_untimed=is_untimed, **values) if lines else ""


def days(records: Sequence[Record]) -> list[str]:
    """Return the days on which runs started, the first one first."""
    return sorted({str(record.row["started_at"])[:10] for record in records if record.row.get("started_at")})


def decision(view: View, fits_in: int | None = None) -> tuple[str, str]:
    """Return which configurations of the largest group to take, by how much, on what that holds, and what is left open.

    It is the group of the answers, or the largest of comparable configurations where no speed is known. With `fits_in`
    only what fits in so many bytes may be taken.
    """
    ok = [line for line in view.lines if line.ok]
    if not ok:
        return sentence("nothing_ran", statuses=Counter(line.status for line in view.lines)), ""
    alike = max(group_by(ok, lambda line: choice_key(line.row)).values(), key=len)
    whole = (view.largest_groups or [Group(alike).relabelled()])[0]
    fitting = [line for line in whole.members if fits_in is None or (line.peak or math.inf) <= fits_in]
    group, row = Group(fitting, whole.title).relabelled(), whole.members[0].row
    unranked = [] if group.chosen or group.is_simulated else group.unranked
    if models := largest_models(view) if fits_in is None else {}:
        clauses, row = [sentence("take_for_size", **models)], row | {"parameters": None}
    elif len(whole.members) == 1 < len(ok):
        clauses, row = [next(scaling_sentences(view), sentence("take_none", total=len(ok))).rstrip(".")], {}
    elif len(fitting) == 1:
        clauses = [sentence("take_the_only_one", line=group.members[0], total=len(view.lines))]
    else:
        clauses = _clauses(group) or [sentence("take_nothing", least=whole.least)]
    where = sentence("where", row=row, title=whole.title, fits_in=fits_in)
    return sentence("decision", where=where, clauses=clauses), sentence(
        "left_open",
        reasons=list(dict.fromkeys(filter(None, (line.speed.unranked_reason for line in unranked)))),
        remedy=remedy(unranked),
        is_timed=any(line.speed.runs for line in ok),
        few=[line for line in group.members if group.contenders and line.speed.may_reach(group.first.speed)],
        on_cpu=ok[0].get("measured_on") == "cpu",
    )


def _clauses(group: Group) -> list[str]:
    """Return what to take for speed and for memory, and for communication where no speed is ranked."""
    chosen, smallest = group.chosen, group.smallest
    is_both = not {*chosen}.isdisjoint(smallest)
    clauses = []
    if chosen:
        kinds = {
            "take_by_the_model": group.is_simulated,
            "take_the_fastest": group.fastest,
            "take_of_a_tie": group.is_tied,
        }
        kind = next((kind for kind, holds in kinds.items() if holds), "take_what_leads")
        clauses.append(sentence(kind, group=group, chosen=chosen, is_both=is_both))
    if smallest and not is_both:
        times = smallest[0].times_as_fast(chosen[0]) if chosen else None
        if group.is_simulated:
            times = smallest[0].ratio("tokens_per_second", chosen[0])
        clauses.append(sentence("take_the_smallest", group=group, times=times))
    fewest = least(group.members, "communication_bytes")
    is_known = None not in column_values(group.members, "communication_bytes")
    if not chosen and is_known and len(fewest) < len(group.members):
        clauses.append(sentence("take_what_sends_least", lines=fewest, is_both=fewest == smallest))
    return clauses
