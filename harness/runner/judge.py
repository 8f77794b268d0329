"""The verdict on a run whose processes have ended: how it ended, and the proof of what its ranks report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.launcher.outcome import LaunchOutcome
from harness.metrics.virtual import virtual_columns
from harness.proof.simulation import verify_simulation
from harness.proof.verify import Verdict, verify_run
from harness.records.rank_report import RankReport
from harness.records.schema import Cells, RecordParts, StepEntry
from harness.runner.plan import Plan
from harness.runner.predicted_columns import predicted_step_time
from harness.runner.record import failure_columns, out_of_memory_reason
from harness.runner.reference import Reference
from harness.util.text import one_line


@dataclass(frozen=True)
class JudgedRun:
    """A run that has ended: the columns that say how, its ranks' reports, and what its proof adds to the record."""

    ending: Cells
    ranks: Sequence[RankReport]
    parts: RecordParts
    steps: Sequence[StepEntry]


def judge_run(plan: Plan, outcome: LaunchOutcome, reference: Reference) -> JudgedRun:
    """Return how the run ended; a run whose ranks all finished is ok only if it is proven."""
    ending: Cells = {"status": outcome.status, "reason": outcome.reason}
    parts = RecordParts()
    steps: Sequence[StepEntry] = ()
    try:
        ranks = plan.folder.read_rank_reports(plan.layout.world_size)
    except ValueError as error:
        ranks, ending = [], {"status": "error", "reason": f"a rank's report is damaged: {one_line(error)}"}
    if ending["status"] == "ok":
        verdict = verify(plan, ranks, reference)
        ending, parts, steps = verdict.columns, verdict.parts, verdict.steps
    if ending["status"] != "ok":
        failed_in = {"failed_in_phase": ending["failed_in_phase"]} if "failed_in_phase" in ending else {}
        world_size = plan.layout.world_size
        ending |= failure_columns(plan.config, plan.folder, world_size, outcome, ranks) | failed_in
    return JudgedRun(ending, ranks, parts, steps)


def verify(plan: Plan, ranks: Sequence[RankReport], reference: Reference) -> Verdict:
    """Return the verdict on a run whose processes all finished; a simulated rank may report that it failed."""
    if plan.config.launch == "processes":
        bounds = plan.command.proof
        return verify_run(plan.config, bounds, plan.layout, plan.widths, ranks, reference.report, reference.note)
    for rank in ranks:
        if rank.status != "ok":
            reason = f"the simulation of rank {rank.rank} failed: {rank.error}: {rank.reason}"
            if rank.status == "oom":
                reason = out_of_memory_reason(plan.config, rank)
            ending: Cells = {"status": rank.status, "reason": reason, "failed_in_phase": rank.phase or None}
            return Verdict(ending, RecordParts())
    verdict = verify_simulation(plan.config, plan.layout, plan.widths, ranks)
    if plan.config.launch == "virtual" and verdict.columns["status"] == "ok":
        measured = virtual_columns(plan.layout, ranks, predicted_step_time(plan))
        return replace(verdict, columns=verdict.columns | measured)
    return verdict
