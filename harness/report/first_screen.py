"""The first screen of a report: what was compared, what came of it, how sure that is, and what fits in a device."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.records.schema import Record
from harness.report.answers import Answer, answers, fastest, remedy
from harness.report.document import Table
from harness.report.findings import checkpointing_answer, memory_wall, scaling_sentences
from harness.report.labels import column_title
from harness.report.lines import Line, distinct_values, rows_of, shared_settings, varying_columns
from harness.report.ranking import Group
from harness.report.sentences import sentence
from harness.report.speeds import leads
from harness.report.text import byte_unit, bytes_text, rounded_up
from harness.report.view import View

MOST_ANSWERS = 6

_MOST_GROUPS = 4  # that the table of memory has


@dataclass(frozen=True)
class FirstScreen:
    """The answer of a report, in plain text; every field but `compared` may be empty."""

    warning: str  # the first line where the machine was busy: its speeds are to be ignored
    compared: str  # what was compared, on what, and when
    banner: str  # on a CPU: which figures carry over to GPUs; on GPUs: that most were idle, if they were
    answers: tuple[Answer, ...]  # at most six, each with a lead: what wins, what it costs, why, how sure
    fits: Table | None  # memory per rank, and the fastest configuration that fits in it


def first_screen(view: View, fits_in: int | None = None) -> FirstScreen:
    """Return the first screen.

    Args:
        view: All runs of the report.
        fits_in: The memory in bytes of the device that a recommendation is for; by default every size of device.
    """
    groups = view.largest_groups(_MOST_GROUPS)
    chosen = tuple(_answers(view, groups, fits_in))
    return FirstScreen(
        warning(view), compared_text(view), _banner(view) or launch_bound(view), chosen, fits_table(groups)
    )


def warning(view: View) -> str:
    """Return the line that says that all speeds are to be ignored; empty unless most of them are."""
    timed = [line for line in view.lines if line.speed.runs]
    ignored = sum(line.speed.is_disturbed for line in timed)
    if 2 * ignored <= len(timed):
        return ""
    busy = sum(bool(line.get("noise_warning")) for line in view.lines if line.ok)
    needs = remedy([line for line in timed if not line.speed.is_ranked])
    kind = "busy_machine" if 2 * busy > ignored else "few_steps"
    return sentence(kind, ignored=ignored, total=len(timed), is_all_busy=busy >= ignored, remedy=needs)


def compared_text(view: View) -> str:
    """Return what was compared, on what machine, and when."""
    lines, statuses = view.lines, Counter(line.status for line in view.lines)
    varied = [name for name in ("strategy", "checkpointing") if len(distinct_values(lines, name)) > 1]
    parts: dict[bool, list[Record]] = {False: [], True: []}
    for record in view.records:
        parts[record.row.get("launch") == "simulated"].append(record)
    return sentence(
        "compared",
        lines=len(lines),
        runs=len(view.records),
        statuses={} if set(statuses) <= {"ok"} else statuses,
        shared=shared_settings(lines),
        varied=varied + [column_title(name) for name in varying_columns(rows_of(lines))],
        is_without_speeds=statuses["ok"] > 1 and not view.draws_speeds,
        parts=[
            (is_simulated, list(dict.fromkeys(filter(None, map(_machine, records)))), _dates(records))
            for is_simulated, records in parts.items()
        ],
        running=view.running,
    )


def _machine(record: Record) -> str:
    """Return the devices or the processor of a run; empty where it is not recorded."""
    environment = record.environment
    if record.row.get("measured_on") in (None, "cpu"):
        return sentence("processor", name=environment.get("processor"), cores=environment.get("cores"))
    cluster = environment if record.row.get("launch") != "simulated" else record.config.get("cluster") or {}
    count, nodes = environment.get("devices"), cluster.get("nodes") or 1
    return sentence("devices", name=record.row["measured_on"], count=count, nodes=nodes)


def _dates(records: Sequence[Record]) -> list[str]:
    """Return the days on which the runs started."""
    return sorted({str(record.row["started_at"])[:10] for record in records if record.row.get("started_at")})


def _banner(view: View) -> str:
    """Return that nothing was measured, or which figures of a CPU carry over to GPUs; empty where all are of GPUs."""
    if distinct_values(view.lines, "launch") == ["simulated"]:
        return sentence("nothing_measured")
    if "cpu" not in distinct_values(view.lines, "measured_on"):
        return ""
    return sentence("measured_on_cpu", kernels=distinct_values(view.lines, "attention_kernel"))


def launch_bound(view: View) -> str:
    """Return that most configurations left their GPUs idle for most of the step; empty unless they did.

    Pipelines do not count: their stages wait for each other, which is their bubble.
    """
    lines = [line for line in view.lines if line.ok and (line.get("pp") or 1) == 1]
    rows = [line.median_run.row for line in lines if line.get("measured_on") != "cpu"]
    known = [(row["idle_seconds"], row["step_seconds"]) for row in rows if row.get("idle_seconds") is not None]
    idle = sum(2 * seconds > whole for seconds, whole in known)
    return sentence("launch_bound", idle=idle, total=len(known)) if 2 * idle > len(known) else ""


def _answers(view: View, groups: Sequence[Group], fits_in: int | None) -> Iterator[Answer]:
    """Yield at most MOST_ANSWERS answers: those on the largest group, and what is particular to these runs."""
    if not groups:
        yield from _without_groups(view)
        return
    *body, certainty = answers(groups[0])
    if warning(view):  # which says that no speed counts, and what would rank them
        body = [answer for answer in body if not answer[0].startswith("Speed")]
    first = _fitting(view, groups[0], fits_in) if fits_in is not None else ("Largest model", memory_wall(view))
    last = [
        (f"Checkpointing{groups[0].where}", checkpointing_answer(groups[0])),
        ("Scaling", next(scaling_sentences(view), "")),
    ]
    known = [(lead, text) for lead, text in (first, *body, *last) if text]
    yield from known[: MOST_ANSWERS - 1]
    yield certainty


def _fitting(view: View, group: Group, fits_in: int) -> Answer:
    """Return what fits in a device's memory among the largest group, and which of that is the fastest."""
    known = [member for member in group.members if member.peak is not None]
    lead = f"Fits in {bytes_text(fits_in)}{group.where}"
    fitting = [member for member in known if member.peak <= fits_in]
    if not fitting:
        return lead, sentence("nothing_fits", least=min((member.peak for member in known), default=None))
    chosen, text, needs = group.among(fitting).relabelled(), "", ""
    if not chosen.winner and len(chosen.ranked) > 1:
        text = fastest(chosen)
    elif not chosen.winner and len(chosen.members) > 1:
        needs = remedy(chosen.unranked)
    return lead, sentence("fitting", chosen=chosen, total=len(group.members), fastest=text, remedy=needs)


def _without_groups(view: View) -> Iterator[Answer]:
    """Yield the figures where no two configurations are comparable."""
    for group in view.groups[: MOST_ANSWERS - 1]:
        (line,) = group.relabelled().members
        lead = "Simulated" if line.get("launch") == "simulated" else "Measured"
        yield lead, sentence("alone", line=line)
    if len(view.groups) > 1:
        yield "Not compared", sentence("none_comparable")


_MOST_ROWS = 12  # of the table of what fits

_CAPTION = "Each row is certainly faster than those above it, and memory is rounded up"


def fits_table(groups: Sequence[Group]) -> Table | None:
    """Return the fastest configuration for each amount of memory per rank; None where no speeds are ranked."""
    entries = [
        (group, line) for group in groups if len(group.front) > 1 or len(group.ranked) > 1 for line in group.front
    ]
    if not entries:
        return None
    caption = _CAPTION
    if len(entries) > _MOST_ROWS:
        caption = f"{_MOST_ROWS} of {len(entries)} steps. {caption}"
        step = (len(entries) - 1) / (_MOST_ROWS - 1)
        entries = [entries[round(row * step)] for row in range(_MOST_ROWS)]
    unit = byte_unit([line.peak for _, line in entries])
    columns = {
        "configurations": [group.title for group, _ in entries] if len({id(group) for group, _ in entries}) > 1 else [],
        "memory per rank": [f"from {rounded_up(line.peak or 0, unit)}" for _, line in entries],
        "fastest that fits": [line.label for _, line in entries],
        "may be as fast or faster": [_may_be_as_fast(line, group) for group, line in entries],
        "tokens/s": [sentence("speed_range", speed=line.speed) for _, line in entries],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, len(columns) - 1, caption, [line.strategy for _, line in entries])


def _may_be_as_fast(line: Line, group: Group) -> str:
    """Return what fits before the next on the front does and is not certainly slower, with the memory that it needs.

    Such a configuration is not certainly slower, or not ranked.
    """
    peak = line.peak or 0
    following = min((size for other in group.front if (size := other.peak or 0) > peak), default=math.inf)
    fitting = [other for other in group.members if other.peak and other.peak < following and other is not line]
    others = sorted(fitting, key=lambda other: (other.peak or 0) > peak)
    rivals = [other for other in others if other.speed.is_ranked and not leads(line.speed, [other.speed])]
    rivals += [other for other in others if other.speed.has_too_few_runs and other.speed.high >= line.speed.low]
    return sentence("may_be_as_fast", rivals=rivals, fits_in=peak)
