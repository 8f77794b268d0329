"""The derivations of times, of operations, and of what is computed from both."""

from collections.abc import Iterator, Sequence

from harness.hardware.peak_flops import peak_flops
from harness.metrics.step_time import slowest_rank, step_seconds
from harness.records.rank_report import RankReport
from harness.records.schema import Record, Row
from harness.report.derivation import Derivation, Term, group_by_value, number
from harness.report.derived_formulas import Setting, executed_flops_formula, model_flops
from harness.report.text import pluralize


def speed(record: Record, ranks: Sequence[RankReport]) -> Iterator[Derivation]:
    """Yield the median step from every timed step, and the tokens per second from it."""
    row = record.row
    steps = step_seconds(ranks)
    if not steps or not row.get("step_seconds"):
        return
    first = (record.config.get("train") or {}).get("warmup_steps", 0)
    terms = [
        Term(f"step {first + position}", seconds, f"rank {slowest_rank(ranks, position).rank}, the slowest", "s")
        for position, seconds in enumerate(steps)
    ]
    sentence = f"The median of all {pluralize(len(steps), 'timed step')}; no step was left out, warm-up is not timed."
    if row.get("noise_warning"):
        sentence += f" The run was disturbed: {row['noise_warning']}."
    yield Derivation("step_seconds", number(row, "step_seconds"), "s", sentence, terms, "median")
    tokens = [
        Term("sequences in a step", number(row, "global_batch"), "train.global_batch"),
        Term("tokens in a sequence", number(row, "seq_len"), "train.seq_len", operator="×"),
        _step_term(row),
    ]
    sentence = "The tokens of a step over the median step."
    yield Derivation("tokens_per_second", number(row, "tokens_per_second"), "tokens/s", sentence, tokens)
    per_device = [
        Term("tokens per second", number(row, "tokens_per_second"), "tokens_per_second", "tokens/s"),
        _device_term(ranks),
    ]
    value = number(row, "tokens_per_second_per_device")
    yield Derivation("tokens_per_second_per_device", value, "tokens/s", "The share of one device.", per_device)


def _step_term(row: Row) -> Term:
    return Term("seconds of the median step", number(row, "step_seconds"), "step_seconds", "s", "÷")


def _device_term(ranks: Sequence[RankReport]) -> Term:
    return Term("devices", sum(rank.devices for rank in ranks), "of all ranks", operator="÷")


def utilization(row: Row, ranks: Sequence[RankReport], setting: Setting | None) -> Iterator[Derivation]:
    """Yield the operations of a step, by formula and as they were counted, and their share of the devices' peak."""
    yield from model_flops(row, setting)
    if row.get("executed_flops") is not None:
        counted = group_by_value({rank.rank: rank.profiled.flops for rank in ranks})
        terms = [
            Term(f"{name}, {value:,} each" if count > 1 else name, value * count, "counted by operator", "FLOPs")
            for name, value, count in counted
        ]
        sentence = f"The operations of all ranks in the profiled step. {executed_flops_formula(row, setting)}".strip()
        yield Derivation("executed_flops", number(row, "executed_flops"), "FLOPs", sentence, terms)
    for column, numerator in (("mfu", "model_flops"), ("hfu", "executed_flops")):
        peak = _peak_term(ranks, setting)
        if row.get(column) is not None and peak:
            terms = [Term(numerator, row[numerator], "see there", "FLOPs"), _step_term(row), peak]
            yield Derivation(column, row[column], "", "The operations over the time and the devices' peak.", terms)
    column = "model_flops_per_second_per_device"
    if row.get(column) is not None:
        terms = [
            Term("model_flops", number(row, "model_flops"), "see there", "FLOPs"),
            _step_term(row),
            _device_term(ranks),
        ]
        yield Derivation(column, row[column], "FLOP/s", "The model's operations over time and devices.", terms)


def _peak_term(ranks: Sequence[RankReport], setting: Setting | None) -> Term | None:
    """Return the dense peak of all devices, None where it is not known."""
    if setting is None:
        return None
    dtype = setting.config.precision.compute
    peaks = [(peak_flops(rank.device_name, dtype), rank.devices) for rank in ranks]
    if any(peak is None for peak, _ in peaks):
        return None
    devices = sum(count for _, count in peaks)
    source = f"dense {dtype} peak by the datasheet of {ranks[0].device_name}"
    total = sum(peak * count for peak, count in peaks if peak)
    return Term(f"peak of {pluralize(devices, 'device')}", total, source, "FLOP/s", "÷")


def bubble(record: Record) -> Iterator[Derivation]:
    """Yield the bubble of a pipeline from the working and the idle time of its ranks."""
    if record.row.get("pipeline_bubble") is None or not record.pipeline:
        return
    totals = {}
    for key in ("idle_seconds", "working_seconds"):
        seconds = {str(entry["rank"]): float(entry[key]) for entry in record.pipeline}  # type: ignore[literal-required]
        totals[key] = sum(seconds.values()), ", ".join(f"rank {rank} {value:.4g} s" for rank, value in seconds.items())
    (idle, idle_ranks), (working, working_ranks) = totals.values()
    terms = [
        Term("idle time of all ranks", idle, "medians of the timed steps", "s", detail=idle_ranks),
        Term("forward and backward", working, "medians of the timed steps", "s", "÷", working_ranks),
    ]
    sentence = "Idle is a step without data, forward, backward and optimizer."
    yield Derivation("pipeline_bubble", number(record.row, "pipeline_bubble"), "", sentence, terms)
