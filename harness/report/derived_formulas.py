"""The formulas behind a row's figures, with the numbers of its model and layout filled in."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.schema import Device, RunConfig
from harness.cost_model import flops
from harness.cost_model.communication import padded_bytes
from harness.cost_model.data_parallel_communication import sent_elements
from harness.cost_model.memory import estimate_memory
from harness.cost_model.rank_memory import optimizer_parameter_count, rank_stages
from harness.cost_model.stage_memory import local_parameter_count
from harness.engines.base import load_engine
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.layout.state_widths import StateKind, StateWidths
from harness.records.rank_report import FUSED_KERNELS
from harness.records.schema import Record, Row
from harness.report.derivation import Derivation, Term
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
        layout: Layout = from_dict(Layout, record.layout)
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
