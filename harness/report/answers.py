"""The answers of a report: what is fastest, what it costs, what is smallest, why, and how sure that is."""

from collections.abc import Iterator, Sequence

from harness.cost_model.memory import PROCESS_BYTES
from harness.report.comparability import EQUAL_BYTES, group_by
from harness.report.lines import Line
from harness.report.ranking import Group
from harness.report.reasons import memory_reason, step_reason
from harness.report.sentences import sentence
from harness.report.speeds import CROWDED, DISJOINT_RUNS, MINIMUM_RUNS, are_alike, has_enough_steps, is_crowded
from harness.report.text import join_words

Answer = tuple[str, str]  # a lead and its text


LEAST_SPREAD = 0.001  # of the peaks of repeats, that a sentence names

SIMULATED_SPEEDS = 4  # that are named where none is measured


def answers(group: Group) -> Iterator[Answer]:
    """Yield the answers on one group of comparable configurations; the last is how sure they are."""
    where, is_ranked = group.where, len(group.ranked) > 1
    texts = {
        f"Fits{where}": _fits(group),
        f"Fastest{where}" if is_ranked else f"Speed{where}": fastest(group) if is_ranked else _unranked(group),
        "Cost": _cost(group),
        f"Least memory{where}": _smallest(group),
        f"Least communication{where}": "" if group.ranked else _least_communication(group),
        "Why": " ".join(_reasons(group)),
        "How sure": _certainty(group),
    }
    yield from ((lead, text) for lead, text in texts.items() if text)


def _fits(group: Group) -> str:
    """Return how much of their devices' memory simulated layouts take; one that does not fit ended as oom."""
    limits = {member.row.get("memory_limit_bytes") for member in group.members if member.speed.is_simulated}
    peaks = [member.peak for member in group.members if member.peak is not None]
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None or len(peaks) < len(group.members):
        return ""
    clusters = [member.record.config.get("cluster") or {} for member in group.members]
    has_budget = any(cluster.get("memory_budget") is not None for cluster in clusters)
    context = None if has_budget else PROCESS_BYTES["cuda"]
    return sentence("layouts_fit", peaks=peaks, limit=limit, context=context)


def fastest(group: Group) -> str:
    """Return the sentence on the winner, or on those that may be the fastest."""
    if group.winner:
        rival = next(member for member in group.ranked if member.program != group.winner.program)
        return sentence("fastest", group=group, winner=group.winner, rival=rival)
    first = (group.contenders or group.ranked)[0]
    kind = "fastest_of_few" if len({member.program for member in group.contenders}) == 1 else "fastest_unknown"
    few = [member for member in group.unranked if member.speed.has_too_few_runs and member.program != first.program]
    rivals = [member for member in few if member.speed.high >= first.speed.low]
    rivals.sort(key=lambda member: -member.speed.median)
    return sentence(kind if group.contenders else "same_program", group=group, first=first, rivals=rivals)


def _cost(group: Group) -> str:
    """Return the memory and the communication of the winner, beside the smallest."""
    winner = group.winner
    if winner is None:
        return ""
    sent = winner.row.get("communication_bytes")
    smallest = group.smallest[0] if group.smallest else winner
    return sentence("cost", winner=winner, smallest=smallest, sent=sent) if winner.peak or sent is not None else ""


def _smallest(group: Group) -> str:
    """Return the sentence on the configurations with the least memory, and what that costs; empty if one is fastest."""
    if not group.smallest or any(line in group.fastest for line in group.smallest):
        return ""
    smallest, reference = group.smallest[0], group.reference
    if reference is smallest or not (reference and reference.peak):
        reference = None
    speed = reference and speed_beside(smallest, reference, is_named=True)
    return sentence("smallest", group=group, reference=reference, speed=speed)


def speed_beside(line: Line, other: Line, is_named: bool) -> str:
    """Return a speed relative to another one, which the text names or not; empty where one of them is not ranked."""
    if not (line.speed.is_ranked and other.speed.is_ranked) or line.program == other.program:
        return ""
    is_alike = are_alike(line.speed, other.speed)
    return sentence("speed_beside", line=line, other=other, is_alike=is_alike, is_named=is_named)


def _reasons(group: Group) -> Iterator[str]:
    """Yield why the winner is faster than the next and than the smallest, and why the smallest is smaller."""
    smallest = group.smallest[0] if group.smallest else None
    if group.winner:
        others = [member for member in group.ranked if member.program != group.winner.program]
        rivals = others[:1]
        if smallest and smallest in others and smallest.program != rivals[0].program:
            rivals.append(smallest)
        yield from (text for rival in rivals if (text := step_reason(group.winner, rival)))
    if smallest and group.reference and (text := memory_reason(smallest, group.reference)):
        yield text


def _least_communication(group: Group) -> str:
    """Return which configuration sends the least; empty where one of them is not counted or all send the same."""
    sent = [line.row.get("communication_bytes") for line in group.members]
    known = [size for size in sent if size is not None]
    if len(known) < len(sent):
        return ""
    fewest = min(known)
    least = [line for line, size in zip(group.members, known, strict=True) if size <= (1 + EQUAL_BYTES) * fewest]
    return "" if len(least) == len(known) else sentence("least_communication", lines=least, sent=fewest)


def _certainty(group: Group) -> str:
    """Return by what rule speeds are ranked and which are not, and what is exact and proven."""
    if all(member.speed.is_simulated for member in group.members):
        return sentence("certainty_of_simulations")
    proven = [line.row for line in group.members if line.row.get("loss_deviation") is not None]
    return sentence(
        "certainty",
        group=group,
        runs=sorted({member.speed.runs for member in group.ranked}),
        disjoint_runs=DISJOINT_RUNS,
        unranked=group_by(group.unranked, lambda member: member.speed.unranked_reason),
        spread=_peak_spread(group.members),
        proven=len(proven),
        steps=sorted({row["proven_steps"] for row in proven if row.get("proven_steps")}),
    )


def _peak_spread(members: Sequence[Line]) -> tuple[float, str] | None:
    """Return by how much peaks of repeats differ and of which configuration, where it is more than a thousandth."""
    spreads = {
        member.label: max(peaks) / min(peaks) - 1
        for member in members
        if (peaks := [peak for run in member.runs if (peak := run.row.get("peak_allocated_bytes"))])
    }
    label = max(spreads, key=lambda name: spreads[name], default="")
    return (spreads[label], label) if label and spreads[label] > LEAST_SPREAD else None


def _unranked(group: Group) -> str:
    """Return why no speeds are ranked, and what would rank them."""
    if all(member.speed.is_simulated for member in group.members):
        lines = sorted(group.members, key=lambda member: -member.speed.median)[:SIMULATED_SPEEDS]
        return sentence("simulated_speeds", lines=lines)
    ignored = [member for member in group.members if member.speed.is_disturbed]
    disturbed = [member for member in ignored if member.row.get("noise_warning")]
    few = [member for member in group.members if member.speed.has_too_few_runs]
    return sentence(
        "unranked",
        group=group,
        disturbed=len(disturbed),
        brief=len(ignored) - len(disturbed),
        few=len(few),
        is_single=all(member.speed.runs == 1 for member in few),
        crowded=sum(member.speed.unranked_reason == CROWDED for member in group.unranked),
        minimum=MINIMUM_RUNS,
        remedy=remedy(group.unranked),
    )


def remedy(lines: Sequence[Line]) -> str:
    """Return what would rank the speeds of these lines, of which none is ranked."""
    runs = [run for line in lines for run in line.runs if run.status == "ok"]
    is_few = any(line.speed.runs < MINIMUM_RUNS for line in lines)
    repeats = "more repeats" if any(len(line.runs) >= MINIMUM_RUNS for line in lines) else f"repeats={MINIMUM_RUNS}"
    parts = [] if all(has_enough_steps(run.row) for run in runs) else ["train.steps=10"]
    is_crowd, is_noisy = any(map(is_crowded, runs)), any(run.row.get("noise_warning") for run in runs)
    parts += [repeats] if is_few or not is_crowd or is_noisy else []
    parts += ["a core for every rank"] if is_crowd else []
    return join_words(parts) + " on a quiet machine" * is_noisy
