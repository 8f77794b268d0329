"""Whether a finished run may have figures: it proves itself, or it is an error that says what is not proven."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness.config.schema import RunConfig
from harness.cost_model.communication import expected_bytes
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.metrics.columns import mean_losses, measured_columns, step_entries, step_phases
from harness.metrics.step_time import pipeline_entries
from harness.metrics.traffic import bytes_by_axis, communication_entries, rank_sending_most
from harness.proof.layout import (
    build_peak_problems,
    gradient_problems,
    layout_problems,
    placement_problems,
    width_problems,
)
from harness.proof.step import (
    checkpointing_problems,
    compile_problems,
    flops_problems,
    kernel_problems,
    offload_problems,
    schedule_problems,
    volume_problems,
)
from harness.proof.training import (
    cross_rank_mismatches,
    deviation,
    deviation_problems,
    dropout_rng_problems,
    overflow_problems,
)
from harness.records.schema import Rank

Values = dict[str, Any]


def verify_run(
    config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[Rank], reference: Rank | None, word: str
) -> tuple[Values, Values]:
    """Columns of the row, and what else belongs in the record. `word` says what became of the reference."""
    layout_faults = layout_problems(config.model, layout, ranks, config.strategy.literature)
    layout_faults += width_problems(widths, config.precision, ranks)
    layout_faults += placement_problems(layout, ranks)
    layout_faults += build_peak_problems(config.model, layout, widths, ranks)
    if config.strategy.literature:
        layout_faults += gradient_problems(config.model, layout, widths, ranks)
    expected = [expected_bytes(config, layout, widths, rank["rank"]) for rank in ranks]
    problems = layout_faults + flops_problems(config, layout, widths, ranks)
    problems += kernel_problems(config, ranks)
    problems += work_problems(config, layout, ranks, expected)
    problems += cross_rank_mismatches(layout, ranks)
    problems += dropout_rng_problems(layout, ranks) if config.model.dropout else []
    proven: Values = {"layout": "failed" if layout_faults else "proven", "reference": word}
    proven |= {"expected_communication_bytes": expected}
    columns: Values = {}
    if reference is not None:
        found = deviation(reference, ranks, config.precision.compute)
        bounds = {"loss": config.proof.loss_bound, "gradient": config.proof.grad_bound}
        limits = {what: bound[config.precision.name] for what, bound in bounds.items()}
        problems += overflow_problems(reference, ranks)
        problems += deviation_problems(found, limits)
        proven |= dataclasses.asdict(found) | {f"{what}_bound": limit for what, limit in limits.items()}
        columns = {"loss_deviation": _finite(found.loss), "grad_deviation": _finite(found.gradient)}
    losses = mean_losses(ranks)
    if None in losses:  # said first: other problems follow from it
        step = losses.index(None)
        columns["phase"] = step_phases(config)[step]
        problems.insert(0, f"the loss is not finite from step {step} on, in {columns['phase']}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        columns |= {"status": "error", "reason": f"not proven: {problems[0]}{more}"}
        return columns, {"proof": proven | {"problems": problems}}
    columns |= {"status": "ok", "reason": ""} | measured_columns(config, layout, ranks)
    return columns, {
        "proof": proven,
        "communication": communication_entries(layout, rank_sending_most(ranks)),
        "traffic": bytes_by_axis(layout, rank_sending_most(ranks), expected[ranks.index(rank_sending_most(ranks))]),
        "pipeline": pipeline_entries(config, layout, ranks),
        "steps": step_entries(config, ranks),
    }


def work_problems(
    config: RunConfig, layout: Layout, ranks: Sequence[Rank], expected: Sequence[dict[str, float]]
) -> list[str]:
    problems = []
    for rank, expected_bytes_of_rank in zip(ranks, expected, strict=True):
        problems += checkpointing_problems(config, layout, rank)
        problems += compile_problems(config, rank)
        problems += offload_problems(config, layout, rank)
        problems += schedule_problems(config, layout, rank)
        if config.strategy.literature:
            problems += volume_problems(layout, rank, expected_bytes_of_rank)
    return problems


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
