"""The formulas behind a row's figures, with the numbers of its model and layout filled in."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.schema import Device, RunConfig
from harness.cost_model import flops
from harness.cost_model.communication import padded_bytes, sent_elements
from harness.cost_model.memory import estimate_memory
from harness.cost_model.rank_memory import optimizer_parameter_count, rank_stages
from harness.cost_model.stage_memory import local_parameter_count
from harness.engines.base import load_engine
from harness.hardware.peak_flops import peak_flops
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.layout.state_widths import StateKind, StateWidths
from harness.metrics.step_time import slowest_rank, step_seconds
from harness.records.rank_report import FUSED_KERNELS, RankReport
from harness.records.schema import Record, Row
from harness.report.derivation import Derivation, Term, group_by_value, number
from harness.report.text import pluralize
from harness.util.errors import UserError

_STATE_KINDS: dict[str, StateKind] = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
}


@dataclass(frozen=True)
class Setting:
    """The inputs of the cost model's formulas for one run."""

    config: RunConfig
    layout: Layout
    widths: StateWidths
    device: Device

    @cached_property
    def most_parameters(self) -> int:
        """The number of parameters on the rank that has most of them, before they are sharded."""
        model, layout = self.config.model, self.layout
        stages = [rank_stages(model, layout, pp_rank) for pp_rank in range(layout.pp)]
        tp, vocabulary_tp = layout.tp, layout.vocabulary_tp
        return max(sum(local_parameter_count(model, stage, tp, vocabulary_tp) for stage in own) for own in stages)


def read_setting(record: Record) -> Setting | None:
    """Return the setting of a recorded run; None where this version of the harness does not know its keys."""
    try:
        config = read_run_config(record.config)
        layout = from_dict(Layout, record.layout)
        widths = load_engine(layout.engine).state_widths(config, layout)
        layout.grad_accumulation_steps(config.train)  # raises UserError for a batch that leaves a remainder
    except (UserError, KeyError, TypeError, AttributeError):
        return None
    return Setting(config, layout, widths, "cpu" if record.row.get("measured_on") == "cpu" else "cuda")


def state_formula(setting: Setting | None, column: str) -> str:
    """Return the formula of one kind of model state on the rank that has most of it; empty if unknown."""
    if setting is None:
        return ""
    config, layout, kind = setting.config, setting.layout, _STATE_KINDS[column]
    width, shards = getattr(setting.widths, kind), layout.shard_count(kind)
    if not width:
        return ""
    if kind == "optimizer" and layout.partitions_by_parameter:
        stages = [rank_stages(config.model, layout, pp_rank) for pp_rank in range(layout.pp)]
        count = max(optimizer_parameter_count(config.model, layout, own) for own in stages)
        return f"By formula {count:,} elements of whole parameters × {width} B = {count * width:,} B."
    count = setting.most_parameters
    parts = f" ÷ {shards} shards" if shards > 1 else ""
    total = -(-width * count // shards)
    return f"By formula {count:,} elements × {width} B{parts} = {total:,} B."


def predicted_peak(row: Row, setting: Setting | None) -> Iterator[Derivation]:
    """Yield the predicted peak by its parts, if this version of the cost model predicts the recorded figure."""
    if setting is None or row.get("predicted_peak_bytes") is None:
        return
    estimate = estimate_memory(setting.config, setting.layout, setting.widths, setting.device)
    if estimate.peak_bytes == row["predicted_peak_bytes"]:
        terms = [Term(name, size, "cost model", "B") for name, size in estimate.at_peak.items() if size]
        sentence = "The parts of the predicted peak at its moment, on the rank with the highest; nothing was measured."
        yield Derivation("predicted_peak_bytes", row["predicted_peak_bytes"], "B", sentence, terms)


def model_flops(row: Row, setting: Setting | None) -> Iterator[Derivation]:
    """Yield the operations that the model needs in a step."""
    if setting is None or row.get("model_flops") != float(flops.model_flops(setting.config)):
        return
    config = setting.config
    layers, passes = config.model.num_hidden_layers, 1 + flops.BACKWARD
    forward = f"2 m n k for each matrix product of {layers} layers, attention included"
    terms = [
        Term("forward of all layers", layers * flops.layer_flops(config), forward, "FLOPs"),
        Term("forward of the head", flops.head_flops(config), "2 m n k of its product", "FLOPs"),
        Term("passes", passes, f"forward, and backward as {flops.BACKWARD} forwards", operator="×"),
    ]
    sentence = "What PaLM counts for MFU (arXiv 2204.02311, appendix B), whatever is computed again."
    yield Derivation("model_flops", row["model_flops"], "FLOPs", sentence, terms)


def executed_flops_formula(row: Row, setting: Setting | None) -> str:
    """Return the formula of the operations that run in a step; empty if unknown."""
    if setting is None:
        return ""
    config, layout = setting.config, setting.layout
    is_fused = row.get("attention_kernel") in FUSED_KERNELS
    last = setting.widths.recomputes_last_projection
    parts = {
        "of the model": flops.model_flops_under_layout(config, layout),
        "of logits computed again": flops.recomputed_logits_flops(config),
        "of attention scores computed again": flops.recomputed_scores_flops(config, layout) if is_fused else 0,
        "of checkpointed layers computed again": flops.recomputed_flops(config, layout, last, is_fused),
        "of a head that every tensor-parallel rank computes": flops.replicated_head_flops(config, layout),
    }
    texts = [f"{count:,} {name}" for name, count in parts.items() if count]
    total = f" = {sum(parts.values()):,}" if len(texts) > 1 else ""
    return f"By formula {' + '.join(texts)}{total}."


def communication_formula(record: Record, rank: int, setting: Setting | None) -> str:
    """Return the formula's bytes by axis; empty if unknown.

    Those along the data-parallel axes are written as a share of elements times their width.
    """
    if setting is None:
        return ""
    config, layout, widths = setting.config, setting.layout, setting.widths
    volumes = {kind: size for kind, size in padded_bytes(config, layout, widths, rank).items() if size}
    if not volumes:
        return ""
    elements: defaultdict[str, float] = defaultdict(float)
    for stage in stages_of_rank(config.model, layout, rank):
        moved = sent_elements(config, layout, widths, stage, rank)
        elements["gather"] += moved.gathered
        elements["reduce"] += moved.reduced
    shards = f"{layout.group_name(*layout.sharding_axes)} "
    ring = Fraction(layout.axes_size(layout.sharding_axes) - 1, layout.axes_size(layout.sharding_axes))
    texts = []
    for kind, size in volumes.items():
        text = f"{kind} {size:,.0f} B"
        name = kind.removeprefix(shards)
        width = {"gather": widths.gathered, "reduce": config.precision.reduce_bytes}.get(name)
        if (
            kind.startswith(shards)
            and width
            and elements[name]
            and round(float(ring) * width * elements[name]) == round(size)
        ):
            text = f"{kind} {ring} × {elements[name]:,.0f} elements × {width} B = {size:,.0f} B"
        texts.append(text)
    return f"By formula {', '.join(texts)}."


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
