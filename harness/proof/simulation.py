"""The verdict on a simulated or virtual run: everything that is proven of a run but the values of its training."""

from collections.abc import Iterator, Sequence

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.metrics.columns import simulated_columns
from harness.proof.shares import share_problems
from harness.proof.verify import FinishedRun, Verdict, evidence, not_proven, proof_entry, prove_layout, prove_steps
from harness.records.rank_report import RankReport
from harness.records.schema import Cells, RecordParts

# By launch, why values are not compared with those of another run.
NO_REFERENCE = {
    "simulated": "none: a simulated run computes no values",
    "virtual": "none: the other ranks of a virtual run do not exist, so that its values are not those of the training",
}


def verify_simulation(config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[RankReport]) -> Verdict:
    """Return the verdict on the ranks of a layout that ran alone: layout and steps are proven, or it is an error."""
    run = FinishedRun(config, layout, widths, ranks)
    layout_problems = list(prove_layout(run, share_problems))
    stage_ranks = layout.world_size // layout.pp
    # One rank of every stage stands for all others of the stage, which do the same.
    whole_world = [rank for rank in ranks for _ in range(stage_ranks)] if len(ranks) == layout.pp else []
    problems = [*layout_problems, *value_problems(config, ranks), *prove_steps(run, whole_world)]
    proof = proof_entry(run, layout_problems, NO_REFERENCE[config.launch])
    if problems:
        return not_proven(problems, proof, {})
    columns: Cells = {"status": "ok", "reason": ""}
    columns |= simulated_columns(config, layout, ranks)
    return Verdict(columns, RecordParts(proof=proof) | evidence(run))


def value_problems(config: RunConfig, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield a line where a rank's loss or gradient norm is not finite, so that its work may be other work.

    Gradients in float16 may overflow, and a simulated rank has no values.
    """
    for rank in ranks:
        values = {"loss": [*rank.losses], "gradient norm": [*rank.grad_norms]}
        if config.precision.compute == "float16":
            del values["gradient norm"]
        for name, numbers in values.items():
            if None in numbers:
                yield f"rank {rank.rank}: the {name} is not finite from step {numbers.index(None)} on"
