"""The first screen of a report: what was compared, what came of it, how sure that is, and what fits in a device."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from harness.records.schema import Record
from harness.report.answers import MOST_RIVALS, Answer, answers, fastest_text
from harness.report.document import Table
from harness.report.frame import column_values, distinct_values, shared_settings, varying_columns
from harness.report.labels import column_title
from harness.report.reported import Reported, ReportedGroup, names, reported_group, reported_groups
from harness.report.speeds import leads, remedy
from harness.report.summary_sentences import checkpointing_answer, memory_wall_sentences, scaling_sentences
from harness.report.text import at_most, byte_unit, bytes_text, join_words, pluralize, rounded_up
from harness.report.view import View, median_run

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
    groups = reported_groups(view, _MOST_GROUPS)
    chosen = tuple(_answers(view, groups, fits_in))
    return FirstScreen(
        warning(view), compared_text(view), _banner(view) or launch_bound(view), chosen, fits_table(groups)
    )


def warning(view: View) -> str:
    """Return the line that says that all speeds are to be ignored; empty unless most of them are."""
    speeds = [standing.speed for standing in view.ranking.standings if standing.speed]
    ignored = sum(speed.is_disturbed for speed in speeds)
    if 2 * ignored <= len(speeds):
        return ""
    is_busy = sum(bool(line.row.get("noise_warning")) for line in view.lines if line.status == "ok")
    count = pluralize(len(speeds), "configuration")
    which = f"all {count}" if ignored == len(speeds) > 1 else f"{ignored} of {count}"
    unranked = [
        line
        for line, standing in zip(view.lines, view.ranking.standings, strict=True)
        if standing.speed and not standing.speed.is_ranked
    ]
    rest = f"Ignore all speeds; memory and bytes are exact. To rank speeds: {remedy(unranked)}."
    if 2 * is_busy > ignored:
        how = "were disturbed" if is_busy >= ignored else "were disturbed or are of fewer than four steps"
        return f"The machine was busy: the times of {which} {how}. {rest}"
    return f"Fewer than four steps were timed in {which}. {rest}"


def compared_text(view: View) -> str:
    """Return what was compared, on what machine, and when."""
    table, records = view.line_medians, view.records
    runs = "" if len(view.lines) == len(records) else f" in {pluralize(len(records), 'run')}"
    statuses = Counter(line.status for line in view.lines)
    ends = (
        "" if set(statuses) <= {"ok"} else f" ({', '.join(f'{count} {status}' for status, count in statuses.items())})"
    )
    text = f"{pluralize(len(view.lines), 'configuration')}{ends}{runs}"
    shared = shared_settings(table)
    text += f": {'; '.join(shared)}." if shared else "."
    varied = [name for name in ("strategy", "checkpointing") if len(distinct_values(table, name)) > 1]
    varied += [column_title(name) for name in varying_columns(table)]
    text += f" They differ in {join_words(varied)}." if varied else ""
    is_compared = sum(line.status == "ok" for line in view.lines) > 1
    text += " This compares memory and communication, not speed." if is_compared and not view.draws_speeds else ""
    simulated = [record for record in records if record.row.get("launch") == "simulated"]
    measured = [record for record in records if record.row.get("launch") != "simulated"]
    for verb, preposition, part in (("Measured", "on", measured), ("Simulated", "for", simulated)):
        machines, dates = _machines(part), _dates(part)
        where = ", ".join(phrase for phrase in (machines and f"{preposition} {machines}", dates) if phrase)
        text += f" {verb} {where}." if where else ""
    if view.running:
        text += f" Still running and not in the tables: {', '.join(view.running)}."
    return text


def _machines(records: Sequence[Record]) -> str:
    """Return the processor or the devices of the records, or how many kinds of machine there are."""
    machines = list(dict.fromkeys(text for record in records if (text := _machine(record))))
    return machines[0] if len(machines) == 1 else f"{len(machines)} kinds of machine" if machines else ""


def _machine(record: Record) -> str:
    environment = record.environment
    if record.row.get("measured_on") not in (None, "cpu"):
        is_simulated = record.row.get("launch") == "simulated"
        cluster = (record.config.get("cluster") or {}) if is_simulated else environment
        nodes = cluster.get("nodes") or 1
        count = f"{environment['devices']} × " if environment.get("devices") else ""
        return f"{count}{record.row['measured_on']}" + (f", {nodes} nodes" if nodes > 1 else "")
    processor, cores = environment.get("processor"), environment.get("cores")
    return f"{processor or 'a CPU'}, {pluralize(cores, 'core')}" if cores else str(processor or "")


def _dates(records: Sequence[Record]) -> str:
    """Return the days on which the runs started."""
    days = sorted({str(record.row["started_at"])[:10] for record in records if record.row.get("started_at")})
    return "" if not days else f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"


def _banner(view: View) -> str:
    """Return that nothing was measured, or which figures of a CPU carry over to GPUs; empty where all are of GPUs."""
    launches = set(distinct_values(view.line_medians, "launch"))
    if launches == {"simulated"}:
        return (
            "Nothing was measured: the engines' code ran on simulated devices, and times are those of a model. Measure"
            " the best few on real ones."
        )
    if "cpu" not in distinct_values(view.line_medians, "measured_on"):
        return ""
    kernels = [str(kernel) for kernel in distinct_values(view.line_medians, "attention_kernel")]
    kernel = f" ({', '.join(kernels)})" if kernels else ""
    return (
        "Measured on a CPU. To GPUs carry over: model state, bytes sent and operations, and activations where the same"
        f" attention kernel runs{kernel}. Not: time, speed, and what fits beside a GPU's own workspaces."
    )


def launch_bound(view: View) -> str:
    """Return that most configurations left their GPUs idle for most of the step; empty unless they did.

    Pipelines do not count: their stages wait for each other, which is their bubble.
    """
    lines = [line for line in view.lines if line.status == "ok" and (line.row.get("pp") or 1) == 1]
    rows = [row for line in lines if (row := median_run(line).row).get("measured_on") != "cpu"]
    known = [(row["idle_seconds"], row["step_seconds"]) for row in rows if row.get("idle_seconds") is not None]
    idle = sum(2 * seconds > whole for seconds, whole in known)
    if 2 * idle <= len(known):
        return ""
    return (
        f"Launch-bound: in {idle} of {pluralize(len(known), 'configuration')} the GPUs were idle for more than half of"
        " the step, waiting for the host to launch kernels. Their speeds compare the overhead of launching, not"
        " the strategies. A larger micro-batch, sequence or model, or compile=true, keeps GPUs busy."
    )


def _answers(view: View, groups: Sequence[ReportedGroup], fits_in: int | None) -> Iterator[Answer]:
    """Yield at most MOST_ANSWERS answers: those on the largest group, and what is particular to these runs."""
    if not groups:
        yield from _without_groups(view)
        return
    *body, certainty = answers(groups[0])
    if warning(view):  # which says that no speed counts, and what would rank them
        body = [answer for answer in body if not answer[0].startswith("Speed")]
    walls = [("Largest model", text) for text in memory_wall_sentences(view)]
    head = [_fitting(view, groups[0], fits_in)] if fits_in is not None else walls
    where = f" {groups[0].title}" if groups[0].title else ""
    tail = [
        *([(f"Checkpointing{where}", text)] if (text := checkpointing_answer(groups[0])) else []),
        *(("Scaling", text) for text in islice(scaling_sentences(view), 1)),
    ]
    yield from [*head, *body, *tail][: MOST_ANSWERS - 1]
    yield certainty


def _fitting(view: View, group: ReportedGroup, fits_in: int) -> Answer:
    """Return what fits in a device's memory among the largest group."""
    whole = view.ranking.groups[0]
    peaks = column_values(view.line_medians, "peak_allocated_bytes")
    positions = {position for position in whole.members if peaks[position] is not None and peaks[position] <= fits_in}
    part = whole.among(positions, view.ranking.standings)
    return (
        fitting(group, fits_in, reported_group(view, part, group.title)) if positions else fitting(group, fits_in, None)
    )


def _without_groups(view: View) -> Iterator[Answer]:
    """Yield the figures where no two configurations are comparable."""
    for group in view.ranking.groups[: MOST_ANSWERS - 1]:
        (line,) = reported_group(view, group, "").members
        figures = [f"{line.speed.median:,.0f} tokens/s (n = {line.speed.runs})"] if not line.speed.is_disturbed else []
        figures += [f"{line.peak_text} per rank at the peak"] if line.peak is not None else []
        verb = "Simulated" if line.row.get("launch") == "simulated" else "Measured"
        yield verb, f"{line.label}: {', '.join(figures) or 'its speed is disturbed'}."
    if len(view.ranking.groups) > 1:
        yield "Not compared", "No two configurations are comparable on the same number of ranks, so that none is best."


_MOST_ROWS = 12  # of the table of what fits

_CAPTION = "Each row is certainly faster than those above it, and memory is rounded up"


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
    if len(chosen.ranked) > 1:
        return lead, f"{count}. {fastest_text(chosen)}"
    if len(chosen.members) == 1:
        (only,) = chosen.members
        return lead, f"{count}: {only.label} in {only.peak_text}."
    ranking = f"Their speeds are not ranked; {remedy([member.record for member in chosen.unranked])} would rank them."
    return lead, f"{count}: {names(chosen.members)}. {ranking}"


def fits_table(groups: Sequence[ReportedGroup]) -> Table | None:
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
        "memory per rank": [f"from {rounded_up(line.peak or 0, unit)} {unit.name}" for _, line in entries],
        "fastest that fits": [line.label for _, line in entries],
        "may be as fast or faster": [_may_be_as_fast(line, group) for group, line in entries],
        "tokens/s": [f"{line.speed.median:,.0f} [{line.speed.low:,.0f}–{line.speed.high:,.0f}]" for _, line in entries],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    strategies = [str(line.row.get("strategy") or "") for _, line in entries]
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, len(columns) - 1, caption, strategies)


def _may_be_as_fast(line: Reported, group: ReportedGroup) -> str:
    """Return what fits before the next on the front does and is not certainly slower, with the memory that it needs.

    Such a configuration is not certainly slower, or not ranked.
    """
    peak = line.peak or 0
    following = min((size for other in group.front if (size := other.peak or 0) > peak), default=None)
    fitting = [other for other in group.members if other.peak and (following is None or other.peak < following)]
    others = sorted((other for other in fitting if other is not line), key=lambda other: (other.peak or 0) > peak)
    rivals = [_rival(other, peak) for other in others if other.speed.is_ranked and not leads(line.speed, [other.speed])]
    rivals += [
        _rival(other, peak) for other in others if other.speed.has_too_few_runs and other.speed.high >= line.speed.low
    ]
    return ", ".join(at_most(rivals, MOST_RIVALS))


def _rival(line: Reported, fits_in: int) -> str:
    """Return a label with the number of runs where they are too few, and the peak where it does not fit."""
    few = "" if line.speed.is_ranked else f" (n = {line.speed.runs})"
    if (line.peak or 0) <= fits_in:
        return f"{line.label}{few}"
    unit = byte_unit([line.peak])
    return f"{line.label}{few} from {rounded_up(line.peak or 0, unit)} {unit.name}"
