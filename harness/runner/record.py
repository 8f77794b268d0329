"""The record of a run: its row, its configuration, its ranks' reports, and the machine and versions that made it.

A combination of a sweep that is impossible as configured has a record too, although no process is started for it.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from harness.config.command import BETWEEN_ATTEMPTS, CommandConfig, merge_values, read_command_config
from harness.config.fingerprint import (
    make_run_id,
    readable_id,
    short_hash,
    with_old_keys,
    without_new_defaults,
)
from harness.config.from_dict import ConfigValues
from harness.config.schema import RunConfig
from harness.cost_model.memory import saved_bytes
from harness.hardware.machine import Machine
from harness.launcher.forkserver import rank_environment, threads_per_rank
from harness.launcher.outcome import LaunchOutcome
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.measure.environment import collect_environment
from harness.metrics.columns import virtual_columns
from harness.metrics.formulas import derivation_entries
from harness.metrics.memory import max_known
from harness.proof.simulation import verify_simulation
from harness.proof.verify import Verdict, verify_run
from harness.records.provenance import git_commit, versions
from harness.records.rank_report import RankReport, to_record_entry
from harness.records.run_folder import comparison_folder
from harness.records.schema import Cell, Cells, Record, RecordParts
from harness.records.store import read_record, write_record
from harness.runner.config_columns import config_columns
from harness.runner.plan import RunPlan
from harness.runner.resolve import machine_of_run, resolve_auto, resolve_run_config
from harness.runner.reuse import ensure_writable, stored_rejection
from harness.util.files import JsonObject
from harness.util.text import UserError


@dataclass(frozen=True)
class Reference:
    """The finished run that another run is compared with, or a note that says why there is none.

    A single process that keeps all activations counts as right. The training of any other layout is compared in its
    turn, with fewer layers, with the reference `shallower`: a chain that ends at such a process.
    """

    note: str  # what a run is compared with and how far back that reaches, or why it is compared with nothing
    plan: RunPlan | None = None  # None where there is no such run
    report: RankReport | None = None  # what its ranks report together
    seconds: float = 0.0  # how long it ran, with all runs of its chain
    shallower: "Reference | None" = None  # what the same layout was compared with on fewer layers

    @property
    def columns(self) -> Cells:
        """The columns of a row that is compared with this, with the layers that the end of the chain trained."""
        if self.plan is None:
            return {"reference": self.note}
        single = (self.shallower or self).plan or self.plan
        layers = single.config.model.num_hidden_layers
        return {"reference": self.note, "reference_layers": layers, "reference_seconds": self.seconds}


def build_record(
    config: RunConfig,
    command: CommandConfig,
    machine: Machine,
    layout: Layout | None,
    run_id: str,
    ending: Cells,
    ranks: Sequence[RankReport] = (),
    parts: RecordParts | None = None,
) -> Record:
    """Return the record of one run, which has everything that is known of it.

    `ending` has its status, reason and figures; `layout` is None where none could be resolved; `parts` are those that
    only some runs have.
    """
    # Without a budget, ranks on a CPU share its memory, of which no share is known.
    budget = config.cluster.memory_budget_bytes
    row = config_columns(config, layout) | {
        "name": command.name,
        "run_id": run_id,
        "measured_on": machine.device_name,
        "memory_limit_bytes": machine.device_bytes if budget is None else budget,
        "started_at": datetime.now(UTC).isoformat(),
    }
    local_ranks = layout.world_size // machine.nodes_needed(layout.world_size) if layout else None
    threads = local_ranks and threads_per_rank(local_ranks)
    variables = rank_environment(machine.device, local_ranks) if local_ranks else {}
    record = Record.from_json(
        {
            "row": row | ending,
            "config": merge_values(config, command),
            "layout": layout.to_dict() if layout else None,
            "ranks": [to_record_entry(rank) for rank in ranks],
            "environment": collect_environment(machine, threads, variables),
            "versions": versions(),
            "commit": git_commit(),
            **(parts or {}),
        }
    )
    derivations = derivation_entries(record)
    return replace(record, derivations=derivations, parts=(*record.parts, "derivations")) if derivations else record


def predicted_columns(plan: RunPlan) -> Cells:
    """Return the predicted peak, activations and step time of a run; none for compiled layers.

    Of a model of transformers only the peak is predicted. The compiler decides what a compiled layer saves and
    allocates, and which of its operators become one kernel.
    """
    if plan.config.train.compile:
        return {}
    config, layout, prediction = plan.config, plan.layout, plan.prediction
    activations = None
    if model_profile(config.model).is_project_decoder:
        activations = max(saved_bytes(config, layout, plan.machine.device, rank)[0] for rank in range(layout.pp))
    return {
        "predicted_peak_bytes": plan.memory.peak_bytes,
        "predicted_activation_bytes": activations,
        "predicted_step_seconds": None if prediction is None else prediction.step_seconds,
    }


def predicted_step_entry(plan: RunPlan) -> JsonObject | None:
    """Return the record's part on the predicted step; None where there is no prediction or layers are compiled.

    The parts add up to the step, in which copies are between device and host, and communication is by axis. The
    interval is that of the harness's own stack, as `harness plan` states it.
    """
    prediction = None if plan.config.train.compile else plan.prediction
    if prediction is None:
        return None
    (low, high), parts = prediction.step_interval, prediction.step_parts
    return {
        "step_seconds": prediction.step_seconds,
        "low_seconds": low,
        "high_seconds": high,
        **{f"{name}_seconds": parts[f"{name}_seconds"] for name in ("forward", "backward", "optimizer", "other")},
        "bubble_seconds": parts["idle_seconds"],
        "copy_seconds": parts["exposed_copy_seconds"],
        "exposed_seconds": prediction.time.exposed_communication_seconds,
    }


def failure_columns(plan: RunPlan, outcome: LaunchOutcome, ranks: Sequence[RankReport]) -> Cells:
    """Return the columns of a run that failed: its phase, and the most memory that a rank last reported.

    The phase is that of the rank to blame, else of the rank that is furthest behind. A rank that ran out of memory
    makes an error an `oom`.
    """
    exhausted = next((rank for rank in ranks if rank.status == "oom"), None)
    beats = {rank: beat for rank in range(plan.layout.world_size) if (beat := plan.folder.read_heartbeat(rank))}
    blamed = exhausted.rank if exhausted else next((failure.rank for failure in outcome.failures), None)
    if blamed not in beats:
        blamed = min(beats, key=lambda rank: beats[rank].step, default=None)
    row: Cells = {
        "failed_in_phase": beats[blamed].phase if blamed in beats else None,
        "last_seen_allocated_bytes": max_known(beat.allocated_bytes for beat in beats.values()),
        "last_seen_rss_bytes": max_known(beat.host_bytes for beat in beats.values()),
        "ended_from_outside": outcome.from_outside or None,
    }
    if outcome.status == "error" and exhausted:
        row |= {"status": "oom", "reason": out_of_memory_reason(plan.config, exhausted)}
    return row


def out_of_memory_reason(config: RunConfig, rank: RankReport) -> str:
    """Return the reason of a run in which this rank ran out of memory."""
    budget = config.cluster.memory_budget
    under = "" if budget is None else f" under cluster.memory_budget={budget}"
    return f"rank {rank.rank} ran out of memory in phase {rank.phase}{under}: {rank.reason}"


def judge_run(plan: RunPlan, outcome: LaunchOutcome, reference: Reference) -> tuple[Verdict, Sequence[RankReport]]:
    """Return how the run ended and its ranks' reports; a run whose ranks all finished is ok only if it is proven."""
    ranks: Sequence[RankReport] = ()
    verdict = Verdict({"status": outcome.status, "reason": outcome.reason}, RecordParts())
    try:
        ranks = plan.folder.read_rank_reports(plan.layout.world_size)
    except UserError as error:
        reason = f"a rank's report is damaged: {error}"
        verdict = Verdict({"status": "error", "reason": reason}, RecordParts())
    if outcome.status != "interrupted" and not plan.folder.spec.exists():
        return Verdict(
            {
                "status": "error",
                "reason": f"{plan.folder.path} was moved or removed while the ranks ran: run it again",
            },
            RecordParts(),
        ), ()
    if verdict.columns["status"] == "ok":
        verdict = verify(plan, ranks, reference)
    if verdict.columns["status"] == "ok":
        return verdict, ranks
    proven_phase = {key: value for key, value in verdict.columns.items() if key == "failed_in_phase"}
    columns = verdict.columns | failure_columns(plan, outcome, ranks) | proven_phase
    return replace(verdict, columns=columns), ranks


def verify(plan: RunPlan, ranks: Sequence[RankReport], reference: Reference) -> Verdict:
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
        predicted = None if plan.prediction is None else plan.prediction.time
        measured = virtual_columns(plan.layout, ranks, predicted)
        return replace(verdict, columns=verdict.columns | measured)
    return verdict


def write_rejected(values: ConfigValues, reason: str) -> Record:
    """Write and return the record of a combination that cannot be run."""
    ensure_writable(comparison_folder(values["name"], values["results_dir"]))
    try:
        machine = machine_of_run(values)
        values = resolve_auto(values, machine.device, machine.compute_capability)
        config, command = resolve_run_config(values), read_command_config(values)
        world_size = config.world_size or machine.world_size
        run_id = make_run_id(config, machine.fingerprint, world_size, corpus="")
        ending: Cells = {"status": "refused", "reason": reason, "world_size": world_size}
        return write_without_plan(values, build_record(config, command, machine, None, run_id, ending))
    except UserError:
        return rejected_values(values, status="refused", reason=reason)


def forget_rejections(values: ConfigValues, plan: RunPlan) -> None:
    """Remove the rows of earlier attempts at these values that were refused before there was a plan.

    Such a row has the id of write_rejected(): without a corpus, or that of values that were not resolved yet.
    """
    machine = plan.machine if plan.machine.sharing == 1 else machine_of_run(values)  # whole, as it was then
    resolved = resolve_auto(values, machine.device, machine.compute_capability)
    world_size = plan.config.world_size or machine.world_size
    without_corpus = make_run_id(plan.config, machine.fingerprint, world_size, corpus="")
    for run_id in {fallback_run_id(values), fallback_run_id(resolved), without_corpus} - {plan.run_id}:
        with suppress(UserError):
            if read_record(folder := plan.comparison.run(run_id).path).status == "refused":
                shutil.rmtree(folder)


def rejected_values(values: ConfigValues, **ending: Cell) -> Record:
    """Write and return the record of values that are no valid configuration, or whose job vanished."""
    names: Cells = {"run_id": fallback_run_id(values), "name": str(values["name"]), **group_names(values)}
    row = names | ending | {"started_at": datetime.now(UTC).isoformat()}
    entries: JsonObject = {"row": row, "config": values, "ranks": [], "versions": versions(), "commit": git_commit()}
    return write_without_plan(values, Record.from_json(entries))


def write_without_plan(values: ConfigValues, record: Record) -> Record:
    """Write a record into the folder of its run and return it; a refusal that is stored there stays."""
    folder = comparison_folder(values["name"], values["results_dir"]).run(record.run_id)
    stored = stored_rejection(folder, bool(values.get("force")))
    if stored is None:
        write_record(folder.path, record)
    return stored or record


def fallback_run_id(values: ConfigValues) -> str:
    """Return the run id of values that are no valid configuration.

    Any of the values may be the invalid one, so all of them are hashed, except those that may change from one attempt
    at the combination to the next.
    """
    hashed = without_new_defaults({key: value for key, value in values.items() if key not in BETWEEN_ATTEMPTS})
    for group, added in {"cluster": ("hardware",), "tracking": ("uri", "options")}.items():  # later keys, not in ids
        if isinstance(values.get(group), dict):
            hashed[group] = {key: value for key, value in values[group].items() if key not in added}
    names = group_names(values)
    return readable_id(names["strategy"], names["checkpointing"], names["model"], key=short_hash(with_old_keys(hashed)))


def group_names(values: ConfigValues) -> dict[str, str]:
    """Return the columns of a row that name what is run."""
    groups = {name: values[name] for name in ("model", "strategy", "checkpointing", "precision")}
    return {name: str(group["name"] or group.get("family")) for name, group in groups.items()}
