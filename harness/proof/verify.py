"""The verdict on a finished run: it is proven and has figures, or it is an error that says what is not proven."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from harness.config.command import ProofConfig
from harness.config.schema import RunConfig
from harness.cost_model.communication import expected_bytes
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.metrics.columns import (
    bytes_by_axis,
    communication_entries,
    mean_losses,
    measured_columns,
    rank_sending_most,
    step_entries,
    step_phases,
)
from harness.metrics.step_time import pipeline_entries
from harness.proof.checkpoint import checkpoint_problems
from harness.proof.layout import (
    build_peak_problems,
    gathered_problems,
    gradient_problems,
    ownership_problems,
    placement_problems,
)
from harness.proof.step import (
    checkpointing_problems,
    compile_problems,
    flops_problems,
    kernel_problems,
    offload_problems,
    recipe_problems,
    routed_rows,
    schedule_problems,
    volume_problems,
)
from harness.proof.training import (
    Comparison,
    compare_training,
    cross_rank_mismatches,
    deviation_problems,
    dropout_mask_problems,
    dropout_rng_problems,
    frozen_problems,
    optimizer_problems,
    overflow_problems,
)
from harness.proof.widths import width_problems
from harness.records.rank_report import RankReport
from harness.records.schema import Cells, ProofEntry, RecordParts
from harness.util.files import JsonObject

# Returns where ranks of a model and a layout hold other shards.
ShardProblems = Callable[[RunConfig, Layout, Sequence[RankReport]], Iterable[str]]


@dataclass(frozen=True)
class FinishedRun:
    """A run whose ranks have all finished: what they were to do, and what they report."""

    config: RunConfig
    layout: Layout
    widths: StateWidths
    ranks: Sequence[RankReport]

    @cached_property
    def expected_bytes(self) -> list[dict[str, float]]:
        """The bytes that each rank sends by the papers' formulas."""
        return [expected_bytes(self.config, self.layout, self.widths, rank.rank) for rank in self.ranks]

    @cached_property
    def padded_bytes(self) -> list[dict[str, float]]:
        """The same with uneven shares, padding and routing, exactly."""
        padded = partial(expected_bytes, self.config, self.layout, self.widths, is_padded=True)
        return [padded(rank.rank, routed=routed_rows(self.layout, rank, self.ranks)) for rank in self.ranks]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a finished run: columns of its row, parts of its record, and its steps if it is proven."""

    columns: Cells
    parts: RecordParts
    steps: Sequence[JsonObject] = ()


def verify_run(
    config: RunConfig,
    bounds: ProofConfig,
    layout: Layout,
    widths: StateWidths,
    ranks: Sequence[RankReport],
    reference: RankReport | None,
    reference_note: str,
) -> Verdict:
    """Return the verdict on a run whose ranks all finished: it is proven, or an error.

    `reference` is the report of the single process that trained the same; the note says what the run was compared with,
    or why it was not.
    """
    run = FinishedRun(config, layout, widths, ranks)
    layout_problems = list(prove_layout(run, ownership_problems))
    problems = [*layout_problems, *frozen_problems(config.model, ranks), *optimizer_problems(config, ranks)]
    problems += prove_steps(run, ranks)
    problems += cross_rank_mismatches(layout, ranks)
    problems += checkpoint_problems(config, ranks)
    if config.model.dropout:
        problems += [*dropout_rng_problems(layout, ranks), *dropout_mask_problems(config, layout, ranks)]
    proof, columns = proof_entry(run, layout_problems, reference_note), Cells()
    if reference is not None:
        comparison = compare_training(reference, ranks, config.precision.least_dtype, bounds.floor_multiple)
        problems += [*overflow_problems(reference, ranks), *deviation_problems(comparison)]
        columns = deviation_columns(comparison)
        proof |= check_entries(comparison)
    step = first_step_without_loss(ranks)
    if step is not None:  # the first problem, since others follow from it
        columns["failed_in_phase"] = step_phases(config)[step]
        problems.insert(0, f"the loss is not finite from step {step} on, in {columns['failed_in_phase']}")
    if problems:
        return not_proven(problems, proof, columns)
    columns |= {"status": "ok", "reason": ""} | measured_columns(config, layout, ranks)
    pipeline = RecordParts(pipeline=pipeline_entries(config, layout, ranks))
    return Verdict(columns, RecordParts(proof=proof) | evidence(run) | pipeline, step_entries(config, ranks))


def not_proven(problems: Sequence[str], proof: ProofEntry, columns: Cells) -> Verdict:
    """Return the verdict on a run of which something is not proven; the first problem is the reason."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    reason: Cells = {"status": "error", "reason": f"not proven: {problems[0]}{more}"}
    return Verdict(columns | reason, {"proof": proof | {"problems": problems}})


def prove_layout(run: FinishedRun, shard_problems: ShardProblems) -> Iterator[str]:
    """Yield where the ranks hold other state than the layout's, of another width, or on another device."""
    config, layout, widths, ranks = run.config, run.layout, run.widths, run.ranks
    if config.strategy.literature:
        yield from gathered_problems(ranks)
    yield from shard_problems(config, layout, ranks)
    yield from width_problems(config, layout, widths, ranks)
    yield from placement_problems(layout, ranks)
    yield from build_peak_problems(config, layout, widths, ranks)
    if config.strategy.literature:
        yield from gradient_problems(config.model, layout, widths, ranks)


def prove_steps(run: FinishedRun, whole_world: Sequence[RankReport]) -> Iterator[str]:
    """Yield where a step did other work than the layout's; operations are counted where the whole world is known."""
    if whole_world:
        yield from flops_problems(run.config, run.layout, run.widths, whole_world)
    yield from kernel_problems(run.config, run.ranks)
    for rank, expected, padded in zip(run.ranks, run.expected_bytes, run.padded_bytes, strict=True):
        yield from checkpointing_problems(run.config, run.layout, rank)
        yield from compile_problems(run.config, rank)
        yield from recipe_problems(run.config, run.layout, rank)
        yield from offload_problems(run.config, run.layout, rank)
        yield from schedule_problems(run.config, run.layout, rank)
        if run.config.strategy.literature:
            yield from volume_problems(run.layout, rank, expected, padded)


def deviation_columns(comparison: Comparison) -> Cells:
    """Return the columns of deviations from the reference and of noise floors; one that is not finite is empty."""
    columns: Cells = {"proven_steps": comparison.proven_steps}
    checks_of = {"loss": comparison.of_loss(), "grad": comparison.of_gradient(), "update": comparison.of_update_norm()}
    for prefix, checks in checks_of.items():
        columns[f"{prefix}_deviation"] = _finite(max((check.deviation for check in checks), default=math.inf))
        floor = max((check.floor for check in checks), default=math.inf)
        columns[f"{prefix}_floor"] = _finite(floor) if comparison.is_floor_measured else None
    return columns


def proof_entry(run: FinishedRun, layout_problems: Sequence[str], reference_note: str) -> ProofEntry:
    """Return the record's part on the proof, without the comparison with a reference."""
    return {
        "layout": "failed" if layout_problems else "proven",
        "reference": reference_note,
        "expected_communication_bytes": run.expected_bytes,
        "padded_communication_bytes": run.padded_bytes,
    }


def check_entries(comparison: Comparison) -> ProofEntry:
    """Return the record's part on the comparison with a reference."""
    return {
        "floor_multiple": comparison.floor_multiple,
        "checks": [
            {
                "deviation": _finite(check.deviation),
                "where": check.where,
                "floor": _finite(check.floor) if comparison.is_floor_measured else None,
                "bound": check.bound,
            }
            for check in comparison.checks
        ],
    }


def evidence(run: FinishedRun) -> RecordParts:
    """Return the record's parts that only a proven run has: communication and traffic."""
    sender = rank_sending_most(run.ranks)
    index = run.ranks.index(sender)
    return {
        "communication": communication_entries(run.layout, sender),
        "traffic": bytes_by_axis(run.layout, sender, run.expected_bytes[index], run.padded_bytes[index]),
    }


def first_step_without_loss(ranks: Sequence[RankReport]) -> int | None:
    """Return the first step whose loss is not finite, or None."""
    losses = mean_losses(ranks)
    return losses.index(None) if None in losses else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
