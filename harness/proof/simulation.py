"""The verdict on a simulated or virtual run: everything that is proven of a run but the values of its training."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.cost_model.communication import expected_bytes, padded_bytes
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.metrics.simulation import simulated_columns
from harness.metrics.traffic import bytes_by_axis, communication_entries, rank_sending_most
from harness.proof.layout import (
    build_peak_problems,
    gradient_problems,
    placement_problems,
    width_problems,
)
from harness.proof.shares import share_problems
from harness.proof.step import (
    checkpointing_problems,
    compile_problems,
    flops_problems,
    kernel_problems,
    offload_problems,
    schedule_problems,
    volume_problems,
)
from harness.proof.verify import Verdict
from harness.records.rank_report import RankReport
from harness.records.schema import Cells, ProofEntry, RecordParts

# By launch, why values are not compared with those of another run.
NO_REFERENCE = {
    "simulated": "none: a simulated run computes no values",
    "virtual": "none: the other ranks of a virtual run do not exist, so that its values are not those of the training",
}


def verify_simulation(config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[RankReport]) -> Verdict:
    """Return the verdict on the ranks of a layout that ran alone: layout and steps are proven, or it is an error."""
    expected = [expected_bytes(config, layout, widths, rank.rank) for rank in ranks]
    padded = [padded_bytes(config, layout, widths, rank.rank) for rank in ranks]
    layout_problems = share_problems(config.model, layout, ranks, config.strategy.literature)
    layout_problems += width_problems(config, widths, ranks)
    layout_problems += placement_problems(layout, ranks)
    layout_problems += build_peak_problems(config, layout, widths, ranks)
    if config.strategy.literature:
        layout_problems += gradient_problems(config.model, layout, widths, ranks)
    problems = layout_problems + value_problems(config, ranks) + kernel_problems(config, ranks)
    stage_ranks = layout.world_size // layout.pp
    if len(ranks) == layout.pp:  # one rank of every stage, and all others of the stage do the same
        problems += flops_problems(config, layout, widths, [rank for rank in ranks for _ in range(stage_ranks)])
    for rank, of_papers, with_padding in zip(ranks, expected, padded, strict=True):
        problems += checkpointing_problems(config, layout, rank)
        problems += offload_problems(config, layout, rank)
        problems += compile_problems(config, rank)
        problems += schedule_problems(config, layout, rank)
        if config.strategy.literature:
            problems += volume_problems(layout, rank, of_papers, with_padding)
    proof: ProofEntry = {
        "layout": "failed" if layout_problems else "proven",
        "reference": NO_REFERENCE[config.launch],
        "expected_communication_bytes": expected,
        "padded_communication_bytes": padded,
    }
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        failure: Cells = {"status": "error", "reason": f"not proven: {problems[0]}{more}"}
        return Verdict(failure, {"proof": proof | {"problems": problems}})
    sender = rank_sending_most(ranks)
    index = ranks.index(sender)
    parts = RecordParts(
        proof=proof,
        communication=communication_entries(layout, sender),
        traffic=bytes_by_axis(layout, sender, expected[index], padded[index]),
    )
    columns: Cells = {"status": "ok", "reason": ""}
    return Verdict(columns | simulated_columns(config, layout, ranks), parts)


def value_problems(config: RunConfig, ranks: Sequence[RankReport]) -> list[str]:
    """Return a line where a rank's loss or gradient norm is not finite, so that its work may be other work.

    Gradients in float16 may overflow, and a simulated rank has no values.
    """
    problems = []
    for rank in ranks:
        values = {"loss": [*rank.losses], "gradient norm": [*rank.grad_norms]}
        if config.precision.compute == "float16":
            del values["gradient norm"]
        for name, numbers in values.items():
            if None in numbers:
                problems.append(f"rank {rank.rank}: the {name} is not finite from step {numbers.index(None)} on")
    return problems
