"""The answers of a report: what is fastest, what it costs, what is smallest, why, and how sure that is.

The reasons are the parts of a step that are longer, and of a peak that are larger.
"""

from collections.abc import Mapping, Sequence

from harness.cost_model.memory import PROCESS_BYTES
from harness.cost_model.parts import PEAK_TITLES
from harness.records.schema import Record
from harness.report.comparability import group_by
from harness.report.labels import STEP_TITLES
from harness.report.lines import Line, least, shared_value
from harness.report.ranking import Group
from harness.report.speeds import CROWDED, DISJOINT_RUNS, MINIMUM_RUNS, has_enough_steps, is_crowded
from harness.report.text import sentence

Answer = tuple[str, str]  # a lead and its text


LEAST_SPREAD = 0.001  # of the peaks of repeats, that a sentence names

SIMULATED_SPEEDS = 4  # that are named where none is measured


def answers(group: Group) -> dict[str, str]:
    """Return the answers on one group of comparable configurations by their kinds; the last is how sure they are."""
    is_ranked, is_simulated = len(group.ranked) > 1, group.is_simulated
    unranked = _simulated_speeds if is_simulated else _unranked
    texts = {
        "fits": _fits(group) if is_simulated else "",
        "fastest": fastest(group) if is_ranked else "",
        "speed": "" if is_ranked else unranked(group),
        "cost": _cost(group),
        "smallest": _smallest(group),
        "least_communication": "" if group.ranked else _least_communication(group),
        "why": _reasons(group),
        "certainty": sentence("certainty_of_simulations") if is_simulated else _certainty(group),
    }
    return {kind: text for kind, text in texts.items() if text}


def lead(kind: str, title: str = "", fits_in: int | None = None) -> str:
    """Return what stands before an answer of a kind on a group with a title, or on what fits in a memory."""
    return sentence("lead", kind=kind, where=title and f" {title}", size=fits_in or 0)


def _fits(group: Group) -> str:
    """Return how much of their devices' memory simulated layouts take; one that does not fit ended as oom."""
    peaks, limit = [member.peak for member in group.members], shared_value(group.members, "memory_limit_bytes")
    clusters = [member.record.config.get("cluster") or {} for member in group.members]
    has_budget = any(cluster.get("memory_budget") is not None for cluster in clusters)
    context = None if has_budget else PROCESS_BYTES["cuda"]
    is_known = limit is not None and None not in peaks
    return sentence("layouts_fit", peaks=peaks, limit=limit, context=context) if is_known else ""


_UNCERTAIN = {0: "same_program", 1: "fastest_of_few"}  # by the number of programs that may be the fastest


def fastest(group: Group) -> str:
    """Return the sentence on the winner, or on those that may be the fastest."""
    first, programs = group.first, {member.program for member in group.contenders}
    kind = "fastest" if group.winner else _UNCERTAIN.get(len(programs), "fastest_unknown")
    few = [line for line in group.members if line.program != first.program and line.speed.may_reach(first.speed)]
    return sentence(kind, group=group, first=first, rivals=sorted(few, key=lambda line: -line.speed.median))


def _cost(group: Group) -> str:
    """Return the memory and the communication of the winner, beside the smallest."""
    winner = group.winner
    is_known = winner and (winner.peak or winner.get("communication_bytes") is not None)
    return sentence("cost", winner=winner, smallest=group.least or winner) if is_known else ""


def _smallest(group: Group) -> str:
    """Return the sentence on the configurations with the least memory, and what that costs; empty if one is fastest."""
    smallest, reference = group.least, group.reference
    if not smallest or not set(group.smallest).isdisjoint(group.fastest):
        return ""
    times = smallest.times_as_fast(reference) if reference else None
    return sentence("smallest", group=group, reference=reference, times=times)


def _reasons(group: Group) -> str:
    """Return why the fastest is faster than another and than the smallest, and why that is smaller.

    A winner is compared with the next, and the highest of speeds that tie or are of a model with the slowest.
    """
    smallest, reference = group.least, group.reference
    is_tie = group.is_tied or group.is_simulated
    fast = group.fastest or (group.contenders or group.chosen if is_tie else [])
    rivals = [line for line in group.slower if fast]
    other = rivals[-1 if is_tie else 0 :][:1]
    slower = other + [line for line in rivals if line is smallest and line.program != other[0].program]
    texts = [step_reason(fast, rival) for rival in slower]
    texts += [memory_reason(smallest, reference)] if smallest and reference else []
    return " ".join(filter(None, texts))


def _least_communication(group: Group) -> str:
    """Return which configuration sends the least; empty where one of them is not counted or all send the same."""
    fewest = least(group.members, "communication_bytes")
    is_known = all(line.get("communication_bytes") is not None for line in group.members)
    return sentence("least_communication", lines=fewest) if is_known and len(fewest) < len(group.members) else ""


def _certainty(group: Group) -> str:
    """Return by what rule speeds are ranked and which are not, and what is exact and proven."""
    compared = [line.row for line in group.members if line.row.get("loss_deviation") is not None]
    proven = [row for row in compared if row.get("proven_steps") != 0]  # where rounding cannot hide a fault
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


def _simulated_speeds(group: Group) -> str:
    """Return the highest speeds where all are those of a model of the device."""
    lines = sorted(group.members, key=lambda member: -member.speed.median)
    return sentence("simulated_speeds", lines=lines[:SIMULATED_SPEEDS])


def _unranked(group: Group) -> str:
    """Return why no speeds are ranked, and what would rank them."""
    ignored = [member for member in group.members if member.speed.is_disturbed]
    return sentence(
        "unranked",
        group=group,
        brief=[member for member in ignored if not member.row.get("noise_warning")],
        disturbed=[member for member in ignored if member.row.get("noise_warning")],
        few=[member.speed.runs for member in group.members if member.speed.has_too_few_runs],
        crowded=[member for member in group.members if member.speed.unranked_reason == CROWDED],
        remedy=remedy(group.unranked),
    )


def remedy(lines: Sequence[Line]) -> str:
    """Return what would rank the speeds of these lines, of which none is ranked."""
    runs = [run for line in lines for run in line.runs if run.status == "ok"]
    return sentence(
        "remedy",
        is_brief=not all(has_enough_steps(run.row) for run in runs),
        is_few=any(line.speed.runs < MINIMUM_RUNS for line in lines),
        has_repeats=any(len(line.runs) >= MINIMUM_RUNS for line in lines),
        is_crowded=any(map(is_crowded, runs)),
        is_noisy=any(run.row.get("noise_warning") for run in runs),
    )


# A part is named if it is at least this share of the difference; the named ones are at least EXPLAINED of it.
_LEAST_SHARE, _EXPLAINED = 0.2, 0.5

_MOST_PARTS = 2

_MORE_OPERATIONS = 1.02  # times as many, that a sentence names


def step_reason(fast: Sequence[Line], slow: Line) -> str:
    """Return the sentence on why a step of `slow` is longer than one of `fast[0]`; empty where no part explains it.

    A part explains it if it is longer in the median runs, and in every run of `slow` longer than in any run of `fast`.
    """
    first = fast[0]
    longer = {
        title: name
        for name, title in STEP_TITLES.items()
        if min(_seconds(slow, name)) > max(second for line in fast for second in _seconds(line, name))
    }
    differences = _differences(slow.median_run, first.median_run, {"step": "step_seconds", **longer})
    parts, operations = _largest(differences, "step"), slow.ratio("executed_flops", first) or 1.0
    recomputed = operations if operations > _MORE_OPERATIONS else None
    facts = {"fast": fast, "slow": slow, "difference": differences["step"], "recomputed": recomputed}
    return sentence("step_reason", parts=parts, **facts) if parts else ""


def _seconds(line: Line, name: str) -> list[float]:
    return [run.row.get(name) or 0.0 for run in line.timed]


def _differences(large: Record, small: Record, columns: Mapping[str, str]) -> dict[str, float]:
    """Return how much larger columns of one run are than another's: parts add up within one run only."""
    return {title: (large.row.get(name) or 0) - (small.row.get(name) or 0) for title, name in columns.items()}


def _largest(differences: Mapping[str, float], whole: str) -> dict[str, float]:
    """Return the largest parts of the whole difference, if together they explain it; none if there is no difference."""
    parts = sorted((item for item in differences.items() if item[0] != whole), key=lambda item: -item[1])
    named = {title: part for title, part in parts[:_MOST_PARTS] if part >= _LEAST_SHARE * differences[whole]}
    return named if 0 < _EXPLAINED * differences[whole] <= sum(named.values()) else {}


def memory_reason(small: Line, large: Line) -> str:
    """Return the sentence on what `large` has more of at its peak; empty where the parts are not known."""
    columns = {title: f"at_peak_{part}_bytes" for part, title in PEAK_TITLES.items()}
    known = {title: name for title, name in columns.items() if name in large.peak_run.row}
    differences = _differences(large.peak_run, small.peak_run, {"peak": "peak_allocated_bytes", **known})
    parts, opposite = _largest(differences, "peak"), min(differences, key=lambda title: differences[title])
    difference = differences["peak"]
    less = max(-differences[opposite], 0) if sum(parts.values()) > difference else 0
    facts = {"difference": difference, "parts": parts, "less": less, "opposite": opposite}
    return sentence("memory_reason", small=small, large=large, **facts) if parts else ""
