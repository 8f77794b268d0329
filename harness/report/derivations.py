"""The derivations of a row's figures: what each of its columns was computed from, by counter or formula."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.cost_model.communication import LAYOUT
from harness.metrics.traffic import rank_sending_most
from harness.records.columns import columns_aggregated_by
from harness.records.rank_report import PeakPart, RankReport
from harness.records.schema import Record, Row
from harness.report.derivation import Derivation, Term, group_by_value
from harness.report.derived_formulas import (
    Setting,
    bubble,
    communication_formula,
    predicted_peak,
    read_setting,
    speed,
    state_formula,
    utilization,
)
from harness.report.labels import PEAK_TITLES
from harness.report.speeds import is_undisturbed, timed_runs
from harness.report.text import join_words, pluralize

_MOST_KINDS = 3  # of buffers that the text names for each part of a peak

# What the blocks of each part of a peak are; see harness.measure.memory_attribution.
_PEAK_SOURCES = {
    "parameter": "blocks of the engine's parameters",
    "optimizer": "blocks of the optimizer's state",
    "gradient": "blocks of the engine's gradients",
    "gathered": "blocks of parameters that were gathered or cast for computing",
    "activation": "blocks that operators saved for backward",
    "communication": "blocks of buckets and messages",
    "temporary": "all other blocks, by the operator that asked for them",
    "rounding": "what torch's allocator adds to the requests",
    "unmatched": "peak of the timed steps less that of the profiled one",
}

_MEDIAN_COLUMNS = {*columns_aggregated_by("median"), "step_seconds"}


def derive_line(line: Record) -> dict[str, Derivation]:
    """Return the derivations of a row that repeated runs share, as harness.report.view merges them.

    A median lists the undisturbed runs and names the others. Any other figure is opened for the run that has it.
    """
    runs = [run for run in line.runs if run.status == line.status] or [line]
    if line.status != "ok" or len(runs) == 1:
        return derive(runs[0])
    derived: dict[str, Derivation] = {}
    by_run = [derive(run) for run in runs]
    for column in dict.fromkeys(column for columns in by_run for column in columns):
        value = line.row.get(column)
        if value is None:
            continue
        if column in _MEDIAN_COLUMNS:
            derived[column] = _median_of_runs(column, value, runs, by_run)
            continue
        opened = [columns[column] for columns in by_run if column in columns and columns[column].value == value]
        if opened:
            most = f"The most of {len(runs)} repeats." if column.endswith("_bytes") else f"One of {len(runs)} repeats."
            derived[column] = opened[0].with_sentence(most)
    return derived


def _median_of_runs(
    column: str, value: float, runs: Sequence[Record], by_run: Sequence[Mapping[str, Derivation]]
) -> Derivation:
    """Return the median over the runs that are timed, with the others in the sentence."""
    timed = {run.run_id for run in timed_runs(runs)}
    unit = next(columns[column].unit for columns in by_run if column in columns)
    terms = [
        Term(f"repeat {run.row.get('repeat')}", run.row[column], run.run_id, unit)
        for run in runs
        if run.run_id in timed and run.row.get(column) is not None
    ]
    others = [f"repeat {run.row.get('repeat')}" for run in runs if run.run_id not in timed]
    is_disturbed = not any(is_undisturbed(run.row) for run in runs)
    sentence = f"The median of {pluralize(len(terms), 'repeat')}, all of them disturbed or barely timed."
    if not is_disturbed:
        left_out = f"; left out as disturbed or barely timed: {join_words(others)}" if others else ""
        sentence = f"The median of {pluralize(len(terms), 'undisturbed repeat')}{left_out}."
    return Derivation(column, value, unit, sentence, terms, "median")


def derive(record: Record) -> dict[str, Derivation]:
    """Return the derivations of a run's row by column; a figure whose terms are not all recorded has none."""
    if record.status != "ok" or not record.ranks:
        return {}
    setting = read_setting(record)
    derivations = {entry.column: entry for entry in _derivations(record, record.ranks, setting)}
    return {column: entry for column, entry in derivations.items() if entry.is_complete}


def _derivations(record: Record, ranks: Sequence[RankReport], setting: Setting | None) -> Iterator[Derivation]:
    row = record.row
    yield from speed(record, ranks)
    yield from utilization(row, ranks, setting)
    yield from _peak(row, ranks)
    sizes = {
        "parameter_bytes": {rank.rank: rank.parameter_bytes for rank in ranks},
        "gradient_bytes": {rank.rank: rank.profiled.gradient_bytes for rank in ranks},
        "optimizer_bytes": {rank.rank: rank.optimizer_bytes for rank in ranks},
    }
    for column, by_rank in sizes.items():
        yield from _most(row, column, by_rank, state_formula(setting, column))
    activations = {rank.rank: rank.profiled.activation_bytes for rank in ranks}
    yield from _most(row, "activation_bytes", activations, "Counted from the tensors that operators saved.")
    yield from _communication(record, ranks, setting)
    yield from predicted_peak(row, setting)
    yield from bubble(record)


def _peak(row: Row, ranks: Sequence[RankReport]) -> Iterator[Derivation]:
    """Yield the peak by what filled it on the fullest rank, or where that is not known by rank."""
    peak = row.get("peak_allocated_bytes")
    if peak is None:
        return
    fullest = max(ranks, key=lambda rank: rank.peak_allocated_bytes or 0)
    details = _kinds(fullest.profiled.at_peak.parts if fullest.profiled.at_peak else ())
    terms = [
        Term(title, row[f"at_peak_{part}_bytes"], _PEAK_SOURCES[part], "B", detail=details.get(part, ""))
        for part, title in PEAK_TITLES.items()
        if row.get(f"at_peak_{part}_bytes")
    ]
    if terms:
        sentence = (
            f"The blocks on rank {fullest.rank}, the fullest of {len(ranks)}, at its peak, in {row.get('peak_phase')}."
        )
        yield Derivation("peak_allocated_bytes", peak, "B", sentence, terms)
    else:
        peaks = {rank.rank: rank.peak_allocated_bytes for rank in ranks if rank.peak_allocated_bytes is not None}
        yield from _most(row, "peak_allocated_bytes", peaks, "What filled it is not known.")


def _kinds(parts: Iterable[PeakPart]) -> dict[str, str]:
    """Return the largest kinds of blocks of each part of a peak."""
    sizes: dict[str, dict[str, int]] = {}
    for part in parts:
        kinds = sizes.setdefault(part.role, {})
        kinds[part.what] = kinds.get(part.what, 0) + part.bytes
    return {role: _largest(kinds) for role, kinds in sizes.items()}


def _largest(kinds: Mapping[str, int]) -> str:
    ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
    rest = sum(size for _, size in ordered[_MOST_KINDS:])
    texts = [f"{name} {size:,} B" for name, size in ordered[:_MOST_KINDS]] + ([f"others {rest:,} B"] if rest else [])
    return ", ".join(texts)


def _most(row: Row, column: str, values: Mapping[int, int], sentence: str) -> Iterator[Derivation]:
    """Yield the largest value of any rank."""
    if row.get(column) is None:
        return
    terms = [Term(ranks, value, "counted", "B") for ranks, value, _ in group_by_value(values)]
    yield Derivation(column, row[column], "B", f"The most of any rank. {sentence}".strip(), terms, "maximum")


def _communication(record: Record, ranks: Sequence[RankReport], setting: Setting | None) -> Iterator[Derivation]:
    """Yield the bytes sent by operation and axis, beside the formula's."""
    if record.row.get("communication_bytes") is None or not record.communication:
        return
    sender = rank_sending_most(ranks).rank
    terms = []
    for entry in record.communication:
        name = f"{entry['operation']} on {entry['axis']}"
        is_layout = entry.get("purpose", LAYOUT) == LAYOUT
        source = f"counted over {pluralize(entry['count'], 'call')}"
        terms.append(Term(name, entry["bytes"], source if is_layout else f"{source}, no part of the formula", "B"))
    formula = communication_formula(record, sender, setting)
    sentence = f"What rank {sender} must send in a step under ring algorithms; no rank sends more. {formula}".strip()
    yield Derivation("communication_bytes", record.row["communication_bytes"], "B", sentence, terms)
