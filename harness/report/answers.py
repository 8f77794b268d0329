"""The answers of a report: what is fastest, what it costs, what is smallest, why, and how sure that is."""

from collections.abc import Iterator, Sequence

from harness.report.document import Table
from harness.report.reasons import memory_reason, step_reason
from harness.report.reported import Reported, ReportedGroup, names, share_text
from harness.report.speeds import MINIMUM_RUNS, are_alike, leads
from harness.report.text import byte_unit, bytes_text, join_words, pluralize, rounded_up

_MOST_RIVALS = 4  # configurations that a sentence names

_MOST_ROWS = 12  # of the table of what fits

Answer = tuple[str, str]  # a lead and its text


def answers(group: ReportedGroup) -> Iterator[Answer]:
    """Yield the answers on one group of comparable configurations; the last is how sure they are."""
    where = f" {group.title}" if group.title else ""
    if len(group.ranked) > 1:
        yield f"Fastest{where}", _fastest(group)
    else:
        yield f"Speed{where}", _unranked_text(group)
    if group.fastest and (cost := _cost(group.fastest[0], group)):
        yield "Cost", cost
    if group.smallest and not {id(line) for line in group.smallest} & {id(line) for line in group.fastest}:
        yield f"Least memory{where}", _smallest(group)
    if not group.ranked and (text := _least_communication(group)):
        yield f"Least communication{where}", text
    if reasons := list(_reasons(group)):
        yield "Why", " ".join(reasons)
    yield "How sure", _certainty(group)


def _fastest(group: ReportedGroup) -> str:
    """Return the sentence on the winner, or on those that may be the fastest."""
    if group.fastest:
        winner = group.fastest[0]
        alike = "" if len(group.fastest) == 1 else f" ({names(group.fastest)} run the same program)"
        others = [member for member in group.ranked if member.program != winner.program]
        lead = f"{winner.speed.median / others[0].speed.median:.2f} × {others[0].label}, the next"
        return f"{winner.label}{alike}: {winner.rate_text}, {lead}."
    if not group.contenders:
        return (
            f"None: all that can be ranked run the same program ({names(group.ranked)}): {group.ranked[0].rate_text}."
        )
    first = group.contenders[0]
    if len({member.program for member in group.contenders}) == 1:
        few = [member for member in group.unranked if not member.speed.is_disturbed]
        blocking = [member for member in few if member.speed.high >= first.speed.low]
        return (
            f"Not certain. {first.label} {first.rate_text} leads those that can be ranked, but {names(blocking)}, which"
            " cannot be ranked, had a run as fast."
        )
    rates = "; ".join(f"{member.label} {member.rate_text}" for member in group.contenders[:_MOST_RIVALS])
    more = f"; and {len(group.contenders) - _MOST_RIVALS} more" if len(group.contenders) > _MOST_RIVALS else ""
    return f"Not certain. These are within run-to-run variation of {first.label}, the highest median: {rates}{more}."


def _cost(winner: Reported, group: ReportedGroup) -> str:
    """Return the memory and the communication of the winner, beside the smallest."""
    parts = []
    if winner.peak:
        smallest = group.smallest[0] if group.smallest else winner
        beside = (
            "" if smallest.peak == winner.peak else f", {winner.peak / (smallest.peak or 1):.2f} × {smallest.label}"
        )
        least = ", the least of all" if smallest.peak == winner.peak else beside
        parts.append(f"{winner.peak_text} per rank at the peak{least}")
    sent = winner.row.get("communication_bytes")
    if sent is not None:
        parts.append(f"{bytes_text(sent)} sent per rank and step" if sent else "nothing sent")
    return f"{winner.label} takes {'; '.join(parts)}." if parts else ""


def _smallest(group: ReportedGroup) -> str:
    """Return the sentence on the configurations with the least memory, and what that costs."""
    smallest = group.smallest[0]
    reference = group.fastest[0] if group.fastest else group.baseline
    text = f"{names(group.smallest)}: {smallest.peak_text} at the peak of the fullest rank"
    if reference is None or reference is smallest or not reference.peak:
        return text + "."
    text += f", {share_text(smallest.peak or 0, reference.peak)} of {reference.label}'s"
    speed = times_text(smallest, reference)
    return f"{text}, at {speed}." if speed else f"{text}."


def times_text(line: Reported, other: Reported) -> str:
    """Return a speed relative to another one; empty where one of them cannot be ranked."""
    if not (line.speed.is_ranked and other.speed.is_ranked) or line.program == other.program:
        return ""
    if are_alike(line.speed, other.speed):
        return f"the same speed as {other.label} within run-to-run variation"
    return f"{line.speed.median / other.speed.median:.2f} × the speed of {other.label}"


def _reasons(group: ReportedGroup) -> Iterator[str]:
    """Yield why the winner is faster than the next and than the smallest, and why the smallest is smaller."""
    smallest = group.smallest[0] if group.smallest else None
    if group.fastest:
        winner = group.fastest[0]
        next_best = next(member for member in group.ranked if member.program != winner.program)
        rivals = [next_best]
        if (
            smallest is not None
            and smallest.speed.is_ranked
            and smallest.program not in (winner.program, next_best.program)
        ):
            rivals.append(smallest)
        yield from (text for rival in rivals if (text := step_reason(winner, rival)))
    reference = group.fastest[0] if group.fastest else group.baseline
    if smallest is not None and reference is not None and (text := memory_reason(smallest, reference)):
        yield text


def _least_communication(group: ReportedGroup) -> str:
    """Return which configuration sends the least; empty where one of them is not counted or all send the same."""
    sent = [line.row.get("communication_bytes") for line in group.members]
    known = [size for size in sent if size is not None]
    if len(known) < len(sent) or len(set(known)) < 2:
        return ""
    least = [line for line, size in zip(group.members, known, strict=True) if size == min(known)]
    return f"{names(least)}: {bytes_text(min(known))} sent per rank and step."


def _certainty(group: ReportedGroup) -> str:
    """Return by what rule speeds are ranked and which are not, and what is exact and proven."""
    text = ""
    if len(group.ranked) > 1:
        runs = sorted({member.speed.runs for member in group.ranked})
        number = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
        text = (
            f"Speeds are medians [ranges] of {number} undisturbed runs; a configuration is called faster only if its"
            " range lies clear of the other's. "
        )
        if group.unranked:
            text += f"Not ranked: {_unranked_names(group)}. "
    proven = sum(line.row.get("loss_deviation") is not None for line in group.members)
    count = "All" if proven == len(group.members) else f"{proven} of the {len(group.members)}"
    trained = f" {count} are proven to have run the same training as the reference." if proven else ""
    return f"{text}Memory and communication are counted to the byte.{trained}"


def _unranked_text(group: ReportedGroup) -> str:
    """Return why no speeds are ranked, and what would rank them."""
    disturbed = sum(member.speed.is_disturbed for member in group.members)
    few = [member for member in group.members if not member.speed.is_disturbed and not member.speed.is_ranked]
    reasons = [f"{disturbed} disturbed or barely timed"] if disturbed else []
    if few:
        ran = "once" if all(member.speed.runs == 1 for member in few) else f"fewer than {MINIMUM_RUNS} times"
        reasons.append(f"{len(few)} ran {ran} undisturbed" if disturbed else f"{len(few)} ran {ran}")
    reasons += [f"{len(group.ranked)} with {MINIMUM_RUNS} undisturbed runs or more"] if group.ranked else []
    where = " on a quiet machine" if disturbed else ""
    return (
        f"Not ranked: of {pluralize(len(group.members), 'configuration')}, {join_words(reasons)}."
        f" repeats={MINIMUM_RUNS}{where} would rank them."
    )


def _unranked_names(group: ReportedGroup) -> str:
    shown = [f"{member.label} ({member.speed.unranked_reason})" for member in group.unranked[:_MOST_RIVALS]]
    rest = len(group.unranked) - _MOST_RIVALS
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def fitting(group: ReportedGroup, fits_in: int, chosen: ReportedGroup | None) -> Answer:
    """Return what fits in a device's memory, and which of that is the fastest.

    Args:
        group: All configurations.
        fits_in: The memory in bytes.
        chosen: The group of those that fit, None if none does.
    """
    limit = bytes_text(fits_in)
    lead = f"Fits in {limit}{f' {group.title}' if group.title else ''}"
    peaks = [member.peak for member in group.members if member.peak is not None]
    if chosen is None:
        return lead, f"Nothing measured here: the least is {bytes_text(min(peaks))}." if peaks else "Not known."
    count = f"{len(chosen.members)} of {pluralize(len(group.members), 'configuration')}"
    if chosen.fastest:
        winner = chosen.fastest[0]
        return lead, f"{count}, of which {winner.label} is the fastest: {winner.rate_text} in {winner.peak_text}."
    if chosen.contenders:
        return lead, f"{count}; within run-to-run variation of the fastest are {names(chosen.contenders)}."
    if len(chosen.members) == 1:
        (only,) = chosen.members
        return lead, f"{count}: {only.label} in {only.peak_text}."
    return lead, f"{count}: {names(chosen.members)}. Their speeds are not ranked (repeats=3 would)."


def fits_table(groups: Sequence[ReportedGroup]) -> Table | None:
    """Return the fastest configuration for each amount of memory per rank; None where no speeds are ranked."""
    entries = [
        (group, line) for group in groups if len(group.front) > 1 or len(group.ranked) > 1 for line in group.front
    ]
    if not entries:
        return None
    caption = "" if len(entries) <= _MOST_ROWS else f"{_MOST_ROWS} of {len(entries)} steps"
    step = (len(entries) - 1) / (_MOST_ROWS - 1)
    entries = entries if not caption else [entries[round(row * step)] for row in range(_MOST_ROWS)]
    unit = byte_unit([line.peak for _, line in entries])
    columns = {
        "configurations": [group.title for group, _ in entries] if len({id(group) for group, _ in entries}) > 1 else [],
        "memory per rank": [f"from {rounded_up(line.peak or 0, unit)} {unit.name}" for _, line in entries],
        "fastest that fits": [line.label for _, line in entries],
        "within run-to-run variation": [_may_be_as_fast(line, group) for group, line in entries],
        "tokens/s": [f"{line.speed.median:,.0f} [{line.speed.low:,.0f}–{line.speed.high:,.0f}]" for _, line in entries],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    strategies = [str(line.row.get("strategy") or "") for _, line in entries]
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, len(columns) - 1, caption, strategies)


def _may_be_as_fast(line: Reported, group: ReportedGroup) -> str:
    """Return the ranked configurations that fit in as much memory and are not certainly slower."""
    peak = line.peak or 0
    smaller = [other for other in group.ranked if other is not line and other.peak is not None and other.peak <= peak]
    rivals = [other for other in smaller if not leads(line.speed, [other.speed])]
    return names(rivals, _MOST_RIVALS) if rivals else ""
