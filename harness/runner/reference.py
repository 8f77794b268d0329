"""The reference of a comparison: a single process that trains the same, with which every run is compared."""

import dataclasses

from harness.config.checkpointing import CheckpointingConfig
from harness.config.strategy import StrategyConfig
from harness.launcher.rank_entry import worker_entry
from harness.records.rank_report import RankReport
from harness.records.schema import Cells
from harness.runner.context import Reference, RunContext
from harness.runner.launch_run import launch_run
from harness.runner.plan import Plan, capacity_problem, make_plan
from harness.runner.reuse import NO_REFERENCE, reusable_record
from harness.util.locks import run_lock

SINGLE_PROCESS = StrategyConfig(name="single")


def get_reference(plan: Plan, context: RunContext) -> Reference:
    """Return the run's reference, which is run once for a comparison and then reused."""
    if not plan.command.proof.reference:
        return Reference(None, NO_REFERENCE)
    if plan.config.model.dropout:
        return Reference(None, f"no other run drops the same values: model.dropout={plan.config.model.dropout}")
    single = reference_plan(plan)
    refusal = capacity_problem(single, context.models)
    if refusal:
        return Reference(None, f"skipped, the single process does not fit: {refusal}")
    with run_lock(single.folder.lock):
        record = reusable_record(single.config, single.command, single.folder, lambda _: None)
        if record is None or (record.status == "ok" and not reference_rank(single)):
            context.log(f"reference {single.run_id}")
            context = dataclasses.replace(context, entry=worker_entry)
            record = launch_run(single, context, Reference(None, NO_REFERENCE))
        rank = reference_rank(single)
    status, reason = record.status, record.row["reason"]
    if status == "oom":
        return Reference(None, f"skipped, the single process ran out of memory: {reason}")
    if status != "ok" or rank is None:
        failure: Cells = {"status": status, "reason": f"nothing to compare with, the single process failed: {reason}"}
        return Reference(None, "failed", failure)
    return Reference(rank, f"compared with {single.run_id}")


def reference_plan(plan: Plan) -> Plan:
    """Return the plan of a run's reference: one process on one node, without any option that only saves time or memory.

    It has no memory budget, because it is none of the comparison's runs: it only proves them.
    """
    train = dataclasses.replace(plan.config.train, loss_chunks=1, fused_optimizer=True, compile=False)
    config = dataclasses.replace(
        plan.config,
        strategy=SINGLE_PROCESS,
        checkpointing=CheckpointingConfig("none"),
        cluster=dataclasses.replace(plan.config.cluster, memory_budget=None),
        train=train,
        world_size=None,
        repeat=0,
    )
    proof = dataclasses.replace(plan.command.proof, reference=False)
    command = dataclasses.replace(plan.command, proof=proof, force=False)
    return make_plan(config, plan.machine, command, is_reference=True)


def reference_rank(single: Plan) -> RankReport | None:
    """Return the report of the reference's rank; None if it is missing or damaged."""
    try:
        return next(iter(single.folder.read_rank_reports(1)), None)
    except ValueError:
        return None
