"""Whether a finished run may have figures: it proves itself, or it is an error that says what is not proven."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness import proof, row
from harness.config import RunConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.plan.communication import expected_bytes
from harness.proof import Rank
from harness.sizes import parameter_count

Values = dict[str, Any]


def judge(
    config: RunConfig, layout: Layout, widths: Widths, ranks: Sequence[Rank], reference: Rank | None, word: str
) -> tuple[Values, Values]:
    """Columns of the row, and what else belongs in the record. `word` says what became of the reference."""
    parameters = parameter_count(config.model)
    layout_problems = proof.layout_problems(layout, ranks, parameters, config.strategy.literature)
    layout_problems += proof.width_problems(widths, config.precision, ranks)
    if config.strategy.literature:
        layout_problems += proof.gradient_problems(layout, widths, ranks, parameters)
    problems = list(layout_problems)
    micro_batches = layout.accumulation(config.train)
    layers = config.model.num_hidden_layers
    problems += proof.checkpointing_problems(layers, micro_batches, config.checkpointing.name, ranks)
    expected = expected_bytes(config, layout, widths, parameters)
    if config.strategy.literature:
        problems += proof.volume_problems(max(map(row.sent_bytes, ranks)), expected)
    if None in row.mean_losses(ranks):
        problems.append("the loss is not finite")
    proven: Values = {"layout": "failed" if layout_problems else "proven", "reference": word}
    proven |= {"expected_communication_bytes": expected}
    columns: Values = {}
    if reference is not None:
        found = proof.deviation(reference, ranks)
        bounds = {"loss": config.proof.loss_bound, "gradient": config.proof.grad_bound}
        limits = {what: bound[config.precision.name] for what, bound in bounds.items()}
        problems += proof.deviation_problems(found, limits)
        proven |= dataclasses.asdict(found) | {f"{what}_bound": limit for what, limit in limits.items()}
        columns = {"loss_deviation": _finite(found.loss), "grad_deviation": _finite(found.gradient)}
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        columns |= {"status": "error", "reason": f"not proven: {problems[0]}{more}"}
        return columns, {"proof": proven | {"problems": problems}}
    columns |= {"status": "ok", "reason": ""} | row.measured(config, ranks)
    return columns, {
        "proof": proven,
        "communication": row.communication(layout, max(ranks, key=row.sent_bytes)),
        "steps": row.steps(config, ranks),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
