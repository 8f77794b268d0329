"""Whether a finished run may have figures: it proves itself, or it is an error that says what is not proven."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness import row
from harness.config import RunConfig
from harness.engines import Widths
from harness.figures.time import pipeline
from harness.figures.traffic import busiest, by_axis, communication
from harness.layout import Layout
from harness.plan.communication import expected_bytes
from harness.proof import Rank, held, training, work

Values = dict[str, Any]


def judge(
    config: RunConfig, layout: Layout, widths: Widths, ranks: Sequence[Rank], reference: Rank | None, word: str
) -> tuple[Values, Values]:
    """Columns of the row, and what else belongs in the record. `word` says what became of the reference."""
    layout_problems = held.layout_problems(config.model, layout, ranks, config.strategy.literature)
    layout_problems += held.width_problems(widths, config.precision, ranks)
    layout_problems += held.place_problems(layout, ranks)
    layout_problems += held.start_problems(config.model, layout, widths, ranks)
    if config.strategy.literature:
        layout_problems += held.gradient_problems(config.model, layout, widths, ranks)
    expected = [expected_bytes(config, layout, widths, rank["rank"]) for rank in ranks]
    problems = layout_problems + work.flops_problems(config, layout, widths, ranks)
    problems += work.kernel_problems(config, ranks)
    problems += work_problems(config, layout, ranks, expected)
    problems += training.disagreements(layout, ranks)
    problems += training.mask_problems(layout, ranks) if config.model.dropout else []
    proven: Values = {"layout": "failed" if layout_problems else "proven", "reference": word}
    proven |= {"expected_communication_bytes": expected}
    columns: Values = {}
    if reference is not None:
        found = training.deviation(reference, ranks, config.precision.compute)
        bounds = {"loss": config.proof.loss_bound, "gradient": config.proof.grad_bound}
        limits = {what: bound[config.precision.name] for what, bound in bounds.items()}
        problems += training.overflow_problems(reference, ranks)
        problems += training.deviation_problems(found, limits)
        proven |= dataclasses.asdict(found) | {f"{what}_bound": limit for what, limit in limits.items()}
        columns = {"loss_deviation": _finite(found.loss), "grad_deviation": _finite(found.gradient)}
    losses = row.mean_losses(ranks)
    if None in losses:  # said first: other problems follow from it
        step = losses.index(None)
        columns["phase"] = row.phases_of_steps(config)[step]
        problems.insert(0, f"the loss is not finite from step {step} on, in {columns['phase']}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        columns |= {"status": "error", "reason": f"not proven: {problems[0]}{more}"}
        return columns, {"proof": proven | {"problems": problems}}
    columns |= {"status": "ok", "reason": ""} | row.measured(config, layout, ranks)
    return columns, {
        "proof": proven,
        "communication": communication(layout, busiest(ranks)),
        "traffic": by_axis(layout, busiest(ranks), expected[ranks.index(busiest(ranks))]),
        "pipeline": pipeline(config, layout, ranks),
        "steps": row.steps(config, ranks),
    }


def work_problems(
    config: RunConfig, layout: Layout, ranks: Sequence[Rank], expected: Sequence[dict[str, float]]
) -> list[str]:
    problems = []
    for rank, bytes_by_axis in zip(ranks, expected, strict=True):
        problems += work.checkpointing_problems(config, layout, rank)
        problems += work.compile_problems(config, rank)
        problems += work.offload_problems(config, layout, rank)
        problems += work.schedule_problems(config, layout, rank)
        if config.strategy.literature:
            problems += work.volume_problems(layout, rank, bytes_by_axis)
    return problems


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
