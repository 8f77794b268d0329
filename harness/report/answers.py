"""The answers of a report: what is fastest, what it costs, what is smallest, why, and how sure that is."""

from collections.abc import Iterator, Sequence

from harness.cost_model.memory import PROCESS_BYTES
from harness.report.comparability import EQUAL_BYTES, group_by
from harness.report.reported import Reported, ReportedGroup, names, share_text
from harness.report.speeds import CROWDED, DISJOINT_RUNS, MINIMUM_RUNS, are_alike, remedy
from harness.report.summary_sentences import memory_reason, step_reason
from harness.report.text import at_most, bytes_text, join_words, percent_text, pluralize, span_text

MOST_RIVALS = 4  # configurations that a sentence names

Answer = tuple[str, str]  # a lead and its text


LEAST_SPREAD = 0.001  # of the peaks of repeats, that a sentence names

SIMULATED_SPEEDS = 4  # that are named where none is measured


def answers(group: ReportedGroup) -> Iterator[Answer]:
    """Yield the answers on one group of comparable configurations; the last is how sure they are."""
    where = f" {group.title}" if group.title else ""
    if text := _fits_text(group):
        yield f"Fits{where}", text
    if len(group.ranked) > 1:
        yield f"Fastest{where}", fastest_text(group)
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


def _fits_text(group: ReportedGroup) -> str:
    """Return how much of their devices' memory simulated layouts take; one that does not fit ended as oom."""
    limits = {member.row.get("memory_limit_bytes") for member in group.members if member.speed.is_simulated}
    peaks = [member.peak for member in group.members if member.peak is not None]
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None or len(peaks) < len(group.members):
        return ""
    clusters = [member.record.config.get("cluster") or {} for member in group.members]
    has_budget = any(cluster.get("memory_budget") is not None for cluster in clusters)
    context = f"a device, of which {bytes_text(PROCESS_BYTES['cuda'])} are assumed for its CUDA context"
    return (
        f"{pluralize(len(group.members), 'layout')} fit in the {bytes_text(limit)} of"
        f" {'cluster.memory_budget' if has_budget else context}: {bytes_text(min(peaks))} to"
        f" {bytes_text(max(peaks))} allocated, without what kernels' workspaces and NCCL take."
    )


def fastest_text(group: ReportedGroup) -> str:
    """Return the sentence on the winner, or on those that may be the fastest."""
    if group.fastest:
        winner = group.fastest[0]
        alike = "" if len(group.fastest) == 1 else f" ({names(group.fastest)} run the same program)"
        others = [member for member in group.ranked if member.program != winner.program]
        following = "the next" if len(group.ranked) == len(group.members) else "the next that is ranked"
        lead = f"{winner.speed.median / others[0].speed.median:.2f} × the speed of {others[0].label}, {following}"
        return f"{winner.label}{alike} at {winner.rate_text}, {lead}."
    if not group.contenders:
        first = group.ranked[0]
        text = f"None: all that can be ranked run the same program ({names(group.ranked)}): {first.rate_text}."
        return text + _challengers_text(group, first)
    first = group.contenders[0]
    if len({member.program for member in group.contenders}) == 1:
        text = f"Not certain. {first.label} {first.rate_text} leads those that can be ranked."
        return text + _challengers_text(group, first)
    rates = "; ".join(f"{member.label} {member.rate_text}" for member in group.contenders[:MOST_RIVALS])
    more = f"; and {len(group.contenders) - MOST_RIVALS} more" if len(group.contenders) > MOST_RIVALS else ""
    text = f"Not certain. None of these is certainly slower than {first.label}, the highest median: {rates}{more}."
    return text + _challengers_text(group, first)


def _challengers_text(group: ReportedGroup, first: Reported) -> str:
    """Return which configurations may win although they cannot be ranked: undisturbed ones with a run as fast.

    The text begins with a space, and is empty if there are none.
    """
    few = [member for member in group.unranked if member.speed.has_too_few_runs and member.program != first.program]
    rivals = sorted(
        (member for member in few if member.speed.high >= first.speed.low), key=lambda member: -member.speed.median
    )
    if not rivals:
        return ""
    verb = "was measured faster" if rivals[0].speed.median > first.speed.median else "had a run as fast"
    rates = [f"{rival.label} {rival.speed.median:,.0f} tokens/s (n = {rival.speed.runs})" for rival in rivals]
    listed = join_words(at_most(rates, MOST_RIVALS))
    return f" Too few undisturbed runs to be ranked, but {verb} and may win: {listed}."


def _cost(winner: Reported, group: ReportedGroup) -> str:
    """Return the memory and the communication of the winner, beside the smallest."""
    parts = []
    if winner.peak:
        smallest = group.smallest[0] if group.smallest else winner
        beside = (
            ""
            if smallest.peak == winner.peak
            else f", {winner.peak / (smallest.peak or 1):.2f} × that of {smallest.label}"
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
    text = f"{names(group.smallest)} with {smallest.peak_text} at the peak of the fullest rank"
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
        return f"no certain difference in speed from {other.label}"
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
    least = [line for line, size in zip(group.members, known, strict=True) if size <= (1 + EQUAL_BYTES) * min(known)]
    return "" if len(least) == len(known) else f"{names(least)} with {bytes_text(min(known))} sent per rank and step."


def _certainty(group: ReportedGroup) -> str:
    """Return by what rule speeds are ranked and which are not, and what is exact and proven."""
    text = ""
    if len(group.ranked) > 1:
        runs = sorted({member.speed.runs for member in group.ranked})
        where = f" {group.title}" if group.title else ""
        clear = "" if runs[0] >= DISJOINT_RUNS else ", of three runs by half the wider one"
        text = (
            f"Speeds{where} are medians [ranges] of {span_text(runs)} undisturbed runs; a configuration is called"
            f" faster only if its range lies above the other's{clear}. "
        )
        if group.unranked:
            by_reason = group_by(group.unranked, lambda member: member.speed.unranked_reason)
            unranked = [f"{names(members)} ({reason})" for reason, members in by_reason.items()]
            text += f"Not ranked: {', '.join(unranked)}. "
    if all(member.speed.is_simulated for member in group.members):
        return (
            "The code of one or more ranks of each layout ran on simulated devices, where every allocation and message"
            " is counted to the byte; times are those of a model."
        )
    counted = f"Memory and communication are counted to the byte{_peak_spread_text(group.members)}."
    return f"{text}{counted}{_proof_text(group.members)}"


def _peak_spread_text(members: Sequence[Reported]) -> str:
    """Return by how much peaks of repeats differ, where it is more than a thousandth; empty if it is not."""
    spreads = {
        member.label: max(peaks) / min(peaks) - 1
        for member in members
        if len(peaks := [peak for run in member.record.runs if (peak := run.row.get("peak_allocated_bytes"))]) > 1
    }
    label = max(spreads, key=lambda name: spreads[name], default="")
    if not label or spreads[label] <= LEAST_SPREAD:
        return ""
    return f"; peaks of repeats differ by up to {percent_text(spreads[label])} ({label}), and the largest is shown"


def _proof_text(members: Sequence[Reported]) -> str:
    """Return how many configurations are proven to run the same training, and for how many steps."""
    proven = [line.row for line in members if line.row.get("loss_deviation") is not None]
    if not proven:
        return ""
    count = f"All {len(members)}" if len(proven) == len(members) > 1 else f"{len(proven)} of the {len(members)}"
    verb = "is" if len(proven) == 1 else "are"
    known = sorted({row["proven_steps"] for row in proven if row.get("proven_steps")})
    steps = f" for {'at least ' * (len(known) > 1)}{pluralize(known[0], 'step')}" if known else ""
    return f" {count} {verb} proven to have run the same training as the reference{steps}."


def _unranked_text(group: ReportedGroup) -> str:
    """Return why no speeds are ranked, and what would rank them."""
    if all(member.speed.is_simulated for member in group.members):
        fastest = sorted(group.members, key=lambda member: -member.speed.median)[:SIMULATED_SPEEDS]
        speeds = [f"{member.label} {member.speed.median:,.0f}" for member in fastest]
        return f"Not ranked, as these are tokens/s by a model of the device: {join_words(speeds)}."
    ignored = [member.row for member in group.members if member.speed.is_disturbed]
    disturbed = sum(bool(row.get("noise_warning")) for row in ignored)
    few = [member for member in group.members if member.speed.has_too_few_runs]
    crowded = [member for member in group.unranked if member.speed.unranked_reason == CROWDED]
    reasons = [f"{disturbed} disturbed"] if disturbed else []
    reasons += [f"{len(ignored) - disturbed} timed over fewer than four steps"] if len(ignored) > disturbed else []
    if few:
        ran = "once" if all(member.speed.runs == 1 for member in few) else f"fewer than {MINIMUM_RUNS} times"
        reasons.append(f"{len(few)} ran {ran}{' undisturbed' * bool(disturbed)}")
    reasons += [f"{len(crowded)} had {CROWDED}"] if crowded else []
    reasons += [f"{len(group.ranked)} with {MINIMUM_RUNS} undisturbed runs or more"] if group.ranked else []
    return (
        f"Not ranked: of {pluralize(len(group.members), 'configuration')}, {join_words(reasons)};"
        f" {remedy([member.record for member in group.unranked])} would rank them."
    )
