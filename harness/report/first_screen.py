"""The first screen of a report: what was compared, what came of it, how sure that is, and what fits in a device."""

import math
from collections import Counter
from collections.abc import Iterator

from harness.records.schema import Record
from harness.report.answers import Answer, answers, fastest, lead, remedy
from harness.report.comparability import group_by, shared_settings, varying_columns
from harness.report.decision import days
from harness.report.document import Table
from harness.report.findings import checkpointing_answer, memory_wall, scaling_sentences
from harness.report.labels import column_title
from harness.report.lines import Line, distinct_values, rows_of
from harness.report.ranking import Group
from harness.report.speeds import leads
from harness.report.text import byte_unit, rounded_up, sentence
from harness.report.view import View

MOST_ANSWERS = 6


def compared_text(view: View) -> str:
    """Return what was compared, on what machine, and when."""
    lines, statuses = view.lines, Counter(line.status for line in view.lines)
    varied = [name for name in ("strategy", "checkpointing") if len(distinct_values(lines, name)) > 1]
    by_launch = group_by(view.records, lambda record: record.row.get("launch") == "simulated")
    return sentence(
        "compared",
        view=view,
        statuses=statuses,
        shared=shared_settings(rows_of(lines)),
        varied=varied + [column_title(name) for name in varying_columns(rows_of(lines))],
        parts=[
            (is_simulated, list(dict.fromkeys(filter(None, map(_machine, records)))), days(records))
            for is_simulated, records in sorted(by_launch.items())
        ],
    )


def _machine(record: Record) -> str:
    """Return the devices or the processor of a run; empty where it is not recorded."""
    row, environment = record.row, record.environment
    device = row.get("measured_on") if row.get("measured_on") != "cpu" else None
    cluster = record.config.get("cluster") or {} if row.get("launch") == "simulated" else environment
    return sentence("machine", device=device, environment=environment, nodes=cluster.get("nodes") or 1)


def banner(view: View) -> str:
    """Return that nothing was measured, or which figures of a CPU carry over to GPUs, or that most GPUs were idle."""
    if distinct_values(view.lines, "launch") == ["simulated"]:
        return sentence("nothing_measured")
    if "cpu" in distinct_values(view.lines, "measured_on"):
        return sentence("measured_on_cpu", kernels=distinct_values(view.lines, "attention_kernel"))
    return launch_bound(view)


def launch_bound(view: View) -> str:
    """Return that most configurations left their GPUs idle for most of the step; empty unless they did.

    Pipelines do not count: their stages wait for each other, which is their bubble.
    """
    lines = [line for line in view.lines if line.ok and (line.get("pp") or 1) == 1 and line.get("measured_on") != "cpu"]
    rows = [row for line in lines if (row := line.median_run.row).get("idle_seconds") is not None]
    idle = sum(2 * row["idle_seconds"] > row["step_seconds"] for row in rows)
    return sentence("launch_bound", idle=idle, total=len(rows)) if 2 * idle > len(rows) else ""


def first_answers(view: View, fits_in: int | None = None) -> Iterator[Answer]:
    """Yield at most MOST_ANSWERS answers: what the decision does not say of the largest group, and what is particular.

    Args:
        view: All runs of the report.
        fits_in: The memory in bytes of the device that a recommendation is for; by default every size of device.
    """
    if not view.largest_groups:
        return
    group = view.largest_groups[0]
    first = {"largest_model": memory_wall(view)} if fits_in is None else {"fits_in": _fitting(group, fits_in)}
    last = {"checkpointing": checkpointing_answer(group), "scaling": next(scaling_sentences(view), "")}
    texts = first | answers(group) | last
    decided = () if any(first.values()) else ("smallest", "least_communication" if not group.is_simulated else "")
    kinds = [kind for kind, text in texts.items() if text and kind not in (*decided, "certainty")]
    yield from ((lead(kind, group.title, fits_in), texts[kind]) for kind in (*kinds[: MOST_ANSWERS - 1], "certainty"))


def _fitting(group: Group, fits_in: int) -> str:
    """Return what fits in a device's memory among the largest group, and which of that is the fastest."""
    fitting = [member for member in group.members if member.peak is not None and member.peak <= fits_in]
    if not fitting:
        return sentence("nothing_fits", least=group.least)
    chosen = Group(fitting).relabelled()
    return sentence(
        "fitting",
        chosen=chosen,
        total=len(group.members),
        fastest=fastest(chosen) if len(chosen.ranked) > 1 else "",
        remedy=remedy(chosen.unranked),
    )


_MOST_ROWS = 12  # of the table of what fits

_TITLES = ("configurations", "memory per rank", "fastest that fits", "may be as fast or faster", "tokens/s")


def fits_table(view: View) -> Table | None:
    """Return the fastest configuration for each amount of memory per rank; None where no speeds are ranked."""
    groups = [group for group in view.largest_groups if len(group.front) > 1 or len(group.ranked) > 1]
    entries = [(group, line) for group in groups for line in group.front]
    if not entries:
        return None
    most = min(_MOST_ROWS, len(entries))
    step = (len(entries) - 1) / max(most - 1, 1)
    shown = [entries[round(row * step)] for row in range(most)]
    caption = sentence("fits_caption", shown=most, total=len(entries))
    has_groups, unit = shown[0][0] is not shown[-1][0], byte_unit([line.peak for _, line in shown])
    rows = [
        (
            group.title if has_groups else "",
            f"from {rounded_up(line.peak or 0, unit)}",
            line.label,
            _may_be_as_fast(line, group),
            sentence("speed_range", speed=line.speed),
        )
        for group, line in shown
    ]
    columns = {title: cells for title, *cells in zip(_TITLES, *rows, strict=True) if any(cells)}
    strategies = [line.strategy for _, line in shown]
    return Table(list(columns), list(zip(*columns.values(), strict=True)), len(columns) - 1, caption, strategies)


def _may_be_as_fast(line: Line, group: Group) -> str:
    """Return what fits before the next on the front does and is not certainly slower, with the memory that it needs.

    Such a configuration is not certainly slower, or not ranked.
    """
    peak = line.peak or 0
    following = min((size for other in group.front if (size := other.peak or 0) > peak), default=math.inf)
    fitting = [other for other in group.members if other.peak and other.peak < following and other is not line]
    rivals = [
        other
        for other in fitting
        if (other.speed.is_ranked and not leads(line.speed, [other.speed])) or other.speed.may_reach(line.speed)
    ]
    rivals.sort(key=lambda other: (not other.speed.is_ranked, (other.peak or 0) > peak))
    return sentence("may_be_as_fast", rivals=rivals, fits_in=peak)
