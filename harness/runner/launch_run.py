"""The launch of a planned run: it prepares the folder, runs the ranks, proves what they did and writes the record."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.hardware.machine import usable_cores
from harness.launcher.forkserver import threads_per_rank
from harness.launcher.launch import launch
from harness.launcher.limits import core_note, shared_memory_note
from harness.launcher.multinode import NodeGroup
from harness.launcher.outcome import LaunchOutcome
from harness.launcher.rank_entry import worker_entry
from harness.measure.native_allocator import build_allocator
from harness.measure.operator_log import build_operator_log
from harness.records.rank_report import RankReport
from harness.records.run_folder import RunSpec
from harness.records.schema import Cells, Record, RecordParts
from harness.records.store import read_record, write_record
from harness.runner.plan import RunPlan
from harness.runner.record import Reference, build_record, judge_run, predicted_columns, predicted_step_entry
from harness.runner.resolve import release_problem
from harness.runner.reuse import STARTED, clear_run_folder, earlier_attempts
from harness.simulator.process import build_device_guard, simulator_entry, virtual_entry
from harness.util.files import JsonObject, atomic_write_text, is_disk_full, release
from harness.util.native_build import announcing_builds
from harness.util.text import UserError, one_line

WARM_UP_NOTE = (
    "train.warmup_steps=1: the second step is timed, in which DDP and DeepSpeed's stage 3 still build buckets and"
    " orders that later steps reuse; choose 2 or more"
)


@dataclass(frozen=True)
class RunContext:
    """The parts of a run's execution that do not change what it measures."""

    entry: Callable[[str], None] = worker_entry  # the function that every rank runs; tests replace it
    models: Sequence[ModelConfig] = ()  # candidates for the suggestion of a smaller model that would fit
    on_progress: Callable[[Path], None] = lambda _: None  # several times a second, with the folder of a run
    log: Callable[[str], None] = lambda _: None  # one line for the user
    nodes: NodeGroup | None = None  # the other nodes, where the machine is more than this one


def launch_run(plan: RunPlan, context: RunContext, reference: Reference) -> Record:
    """Run the ranks, prove what they did, and write and return the record, however they end.

    The folder has a record with status `interrupted` while they run, so that a record remains if this command dies.
    """
    started: Cells = {"started_at": datetime.now(UTC).isoformat(), **earlier_attempts(plan.folder)}
    try:
        write_row(plan, {"status": "interrupted", "reason": STARTED, **started})
        with announcing_builds(context.log):  # and with nothing of an earlier attempt in the folder
            clear_run_folder(plan.folder)
            plan.folder.ranks.mkdir()
            spec, notes = build_run_spec(plan)
            spec.write(plan.folder.path)
    except (RuntimeError, OSError, UserError) as error:
        reason = f"before any rank was started: {one_line(error)}"
        return write_row(plan, {"status": "error", "reason": reason, **started})
    for note in notes:
        context.log(note)
    if "earlier_ends" in started:
        notes.append(f"this was attempt {started['attempts']}; before: {started['earlier_ends']}")
    try:
        outcome = run_ranks(plan, context)
    finally:
        shutil.rmtree(plan.folder.checkpoint, ignore_errors=True)
    verdict, ranks = judge_run(plan, outcome, reference)
    for rank in ranks:
        if rank.trace_problem:
            note = f"the time of rank {rank.rank}'s steps is not divided: {rank.trace_problem}"
            context.log(note)
            notes.append(note)
            break
    ending = verdict.columns | reference.columns | started | {"duration_seconds": outcome.seconds}
    return write_row(plan, ending, ranks, verdict.parts | {"notes": notes}, verdict.steps)


def build_run_spec(plan: RunPlan) -> tuple[RunSpec, list[str]]:
    """Return the run file's content and notes on what could not be built; what is in C++ is built here."""
    is_simulated = plan.config.launch == "simulated"
    ranks = 0 if is_simulated else plan.processes_per_node
    device_notes = (
        core_note(plan.machine.device, ranks, len(usable_cores())),
        shared_memory_note(plan.machine.device, ranks),
        WARM_UP_NOTE if plan.config.train.warmup_steps == 1 else None,
    )
    notes, allocator, operator_log = [note for note in device_notes if note], None, None
    cache = Path(plan.config.data.cache).expanduser()
    if plan.machine.device == "cpu" and not is_simulated:
        try:
            allocator = str(build_allocator(cache))
            operator_log = str(build_operator_log(cache))  # without it torch's profiler takes its place
        except (RuntimeError, UserError) as error:
            if plan.config.cluster.memory_budget is not None:  # without it nothing would enforce the budget
                raise
            notes.append(f"memory is not counted: {one_line(error)}")
    return RunSpec(
        run_id=plan.run_id,
        config=plan.config,
        layout=plan.layout,
        corpus=plan.corpus,
        device=plan.machine.device,
        threads=threads_per_rank(plan.ranks_per_node),
        allocator=allocator,
        operator_log=operator_log,
        timeout_seconds=plan.command.timeout_seconds,
        memory_snapshot=plan.command.measure.memory_snapshot,
        perturbs=plan.folder.is_reference and not plan.config.model.dropout,  # which other rounding moves
        simulated_ranks=() if plan.config.launch == "processes" else plan.ranks_alone,
        device_guard=str(build_device_guard(cache)) if is_simulated and plan.machine.device == "cuda" else None,
        device_name=plan.machine.device_name,
        device_bytes=plan.machine.device_bytes,
    ), notes


def run_ranks(plan: RunPlan, context: RunContext) -> LaunchOutcome:
    """Run all ranks to their end, on this node or on every node of the context's group.

    Virtual ranks run one after another, each in a process of its own, until one fails. A simulation is one process,
    which waits for no other rank, so that it cannot hang. After a failure of real ranks this waits until killed ranks
    have released their devices, so that the next run finds them free.
    """
    mode = plan.config.launch
    launch_ranks = partial(context.nodes.launch, plan.nodes) if context.nodes and mode == "processes" else launch
    outcome, seconds = LaunchOutcome("ok", "", (), 0.0), 0.0
    for _ in plan.ranks_alone if mode == "virtual" else (0,):
        outcome = launch_ranks(
            {"processes": context.entry, "simulated": simulator_entry, "virtual": virtual_entry}[mode],
            plan.folder.path,
            plan.layout.world_size if mode == "processes" else 1,
            device="cpu" if mode == "simulated" else plan.machine.device,
            libraries=[] if mode == "simulated" else rank_libraries(plan.config),
            timeout_seconds=plan.command.timeout_seconds - seconds,
            hang_seconds=math.inf if mode == "simulated" else plan.command.hang_seconds,
            on_tick=lambda: context.on_progress(plan.folder.path),
        )
        seconds += outcome.seconds
        if outcome.status != "ok":
            break
    if mode == "processes" and outcome.status not in ("ok", "interrupted"):
        problem = release_problem(plan.machine, plan.config.cluster)
        if problem:
            context.log(problem)
    return replace(outcome, seconds=seconds)


def rank_libraries(config: RunConfig) -> list[str]:
    """Return the names of the libraries, of those that few runs need, that the ranks of this one use."""
    is_used = {
        "peft": config.model.adapter.is_enabled,
        "torchao": config.precision.has_recipe
        or any(rule.library == "torchao" for rule in config.optimizer.spec.rules),
        "transformers": config.model.hf_info is not None,
    }
    return [name for name, used in is_used.items() if used]


def write_row(
    plan: RunPlan,
    ending: Cells,
    ranks: Sequence[RankReport] = (),
    parts: RecordParts | None = None,
    steps: Sequence[JsonObject] = (),
) -> Record:
    """Write the run's record, and its steps if it has any, and return it. On a full disk, write the row alone.

    `ending` has the columns that say how the run ended. Raises OSError if even the row cannot be written.
    """
    ending = ending | predicted_columns(plan)
    parts = (parts or RecordParts()) | {"corpus": plan.corpus.fingerprint}
    predicted = predicted_step_entry(plan)
    parts |= {} if predicted is None else {"predicted_step": predicted}
    try:
        return write_record_files(plan, ending, ranks, parts, steps)
    except OSError as error:
        if not is_disk_full(error):
            raise
        release(plan.comparison.reserve)
        known = {key: ending[key] for key in ("started_at", "duration_seconds", "failed_in_phase") if key in ending}
        status = "error" if ending["status"] == "ok" else ending["status"]
        end = ending["reason"] or "the ranks finished"
        reason = f"{end}; {one_line(error)}: free some disk space and run it again"
        return write_record_files(plan, known | {"status": status, "reason": reason}, (), RecordParts(), ())


def write_record_files(
    plan: RunPlan, ending: Cells, ranks: Sequence[RankReport], parts: RecordParts, steps: Sequence[JsonObject]
) -> Record:
    """Write record.json and steps.jsonl, and return the record as it is read back. Raises OSError."""
    record = build_record(plan.config, plan.command, plan.machine, plan.layout, plan.run_id, ending, ranks, parts)
    plan.folder.path.mkdir(parents=True, exist_ok=True)
    if steps:
        atomic_write_text(plan.folder.steps, "".join(json.dumps(step) + "\n" for step in steps))
    write_record(plan.folder.path, record)
    return read_record(plan.folder.path)
