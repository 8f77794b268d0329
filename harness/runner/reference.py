"""TODO harness.runner.reference."""

import dataclasses

from harness.config.schema import CheckpointingConfig, StrategyConfig
from harness.launcher.rank_entry import worker_entry
from harness.records.run_folder import RunFolder
from harness.records.schema import Rank
from harness.runner.context import Reference, RunContext
from harness.runner.launch_run import start_run
from harness.runner.plan import Plan, capacity_problem, make_plan
from harness.runner.reuse import NO_REFERENCE, reusable_record
from harness.util.locks import run_lock

SINGLE_PROCESS = StrategyConfig(name="single")


def get_reference(this: Plan, means: RunContext) -> Reference:
    """The single process that trains the same, run once a comparison and kept."""
    if not this.config.proof.reference:
        return Reference(None, NO_REFERENCE)
    if this.config.model.dropout:
        return Reference(None, f"no other run drops the same: model.dropout={this.config.model.dropout}")
    single = reference_plan(this)
    refused = capacity_problem(single, means.models)
    if refused:
        return Reference(None, f"skipped, the single process does not fit: {refused}")
    with run_lock(RunFolder(single.directory).lock):
        record = reusable_record(single.config, single.directory, lambda _: None)
        if record is None or (record["row"]["status"] == "ok" and not reference_rank(single)):
            means.log(f"reference {single.run_id}")
            alone = dataclasses.replace(means, entry=worker_entry)
            record = start_run(single, alone, Reference(None, NO_REFERENCE))
        rank = reference_rank(single)
    status, reason = record["row"]["status"], record["row"]["reason"]
    if status == "oom":
        return Reference(None, f"skipped, the single process ran out of memory: {reason}")
    if status != "ok" or rank is None:
        ending = {"status": status, "reason": f"nothing to compare with, the single process failed: {reason}"}
        return Reference(None, "failed", ending)
    return Reference(rank, f"compared with {single.run_id}")


def reference_plan(this: Plan) -> Plan:
    """The reference's plan: one process on one node, with nothing that only makes a run cheaper."""
    config = dataclasses.replace(
        this.config,
        strategy=SINGLE_PROCESS,
        checkpointing=CheckpointingConfig("none"),
        world_size=None,
        repeat=0,
        force=False,
    )
    plain = dataclasses.replace(config.train, loss_chunks=1, fused_optimizer=True, compile=False)
    config = dataclasses.replace(config, train=plain, proof=dataclasses.replace(config.proof, reference=False))
    unbounded = dataclasses.replace(config.cluster, memory_budget=None)  # it is proof, and no run of the comparison
    config = dataclasses.replace(config, cluster=unbounded)
    return make_plan(config, this.machine, is_reference=True)


def reference_rank(single: Plan) -> Rank | None:
    """What the single process wrote; None if that is gone or damaged."""
    try:
        return next(iter(RunFolder(single.directory).read_rank_reports(1)), None)
    except ValueError:
        return None
