"""TODO harness.runner.launch_run."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness.cost_model import memory
from harness.engines.base import load_engine
from harness.launcher.launch import launch, threads_per_rank
from harness.measure.native_allocator import build_allocator
from harness.proof.verify import verify_run
from harness.records.run_folder import ComparisonFolder, RunFolder
from harness.records.run_spec import RunSpec
from harness.records.schema import Rank, Record
from harness.records.store import read_record, write_record
from harness.runner.context import Reference, RunContext
from harness.runner.plan import Plan
from harness.runner.record import build_record, failure_columns
from harness.runner.reuse import STARTED, clear_run_folder
from harness.util.disk_reserve import is_disk_full, release
from harness.util.errors import UserError
from harness.util.files import atomic_write_text
from harness.util.text import one_line


def build_run_spec(this: Plan) -> tuple[RunSpec, list[str]]:
    """The run file, with what must be built before ranks start; and words on what could not be."""
    notes, allocator = [], None
    cache = Path(this.config.data.cache).expanduser()
    if this.machine.device == "cpu":
        try:
            allocator = str(build_allocator(cache))
        except (RuntimeError, UserError) as error:
            if this.config.cluster.memory_budget is not None:  # nothing would refuse what is beyond it
                raise
            notes.append(f"memory is not counted: {one_line(error)}")
    variables = load_engine(this.layout.engine).rank_environment(this.layout, this.machine, cache)
    threads = threads_per_rank(this.layout.world_size // this.nodes)
    return RunSpec(
        this.run_id, this.config, this.layout, this.corpus, this.machine.device, threads, allocator, variables
    ), notes


def start_run(this: Plan, means: RunContext, reference: Reference) -> Record:
    """Runs the ranks and writes the record, whatever their end; until then one that tells of a command that died."""
    began = {"started_at": datetime.now(UTC).isoformat()}
    try:
        write_row(this, {"status": "interrupted", "reason": STARTED} | began)
        clear_run_folder(this.directory)
        RunFolder(this.directory).ranks.mkdir()
        made, notes = build_run_spec(this)
        made.write(this.directory)
    except (RuntimeError, OSError, UserError) as error:
        return write_row(this, {"status": "error", "reason": f"before any rank was started: {one_line(error)}"} | began)
    for note in notes:
        means.log(note)
    world_size = this.layout.world_size
    ranks_of = partial(means.nodes.launch, this.nodes) if means.nodes else launch
    outcome = ranks_of(
        means.entry,
        this.directory,
        world_size,
        device=this.machine.device,
        timeout_seconds=this.config.timeout_seconds,
        hang_seconds=this.config.hang_seconds,
        on_tick=lambda: means.on_progress(this.directory),
    )
    ending: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason}
    extra: dict[str, Any] = {}
    try:
        ranks = RunFolder(this.directory).read_rank_reports(world_size)
    except ValueError as error:
        ranks, ending = [], {"status": "error", "reason": f"what its ranks wrote is damaged: {one_line(error)}"}
    if ending["status"] == "ok":
        ending, extra = verify_run(this.config, this.layout, this.widths, ranks, reference.rank, reference.note)
    if ending["status"] != "ok":
        at = {"phase": ending["phase"]} if "phase" in ending else {}
        ending |= failure_columns(this.config, this.directory, world_size, outcome, ranks) | at
    ending |= began | {"seconds": outcome.seconds}
    return write_row(this, ending, ranks, extra | {"notes": notes})


def write_row(
    this: Plan, ending: dict[str, Any], ranks: Sequence[Rank] = (), extra: dict[str, Any] | None = None
) -> Record:
    """Writes record.json and, where there are steps, steps.jsonl beside it. On a full disk the row alone."""
    if not this.config.train.compile:  # what a compiled layer keeps and makes is the compiler's choice
        ending |= memory.predicted(this.config, this.layout, this.widths, this.machine.device)
    extra = (extra or {}) | {"corpus": this.corpus.fingerprint}
    try:
        return write_record_files(this, ending, ranks, extra)
    except OSError as error:
        if not is_disk_full(error):
            raise
        release(ComparisonFolder(this.folder).reserve)
        known = {key: ending[key] for key in ("started_at", "seconds", "phase") if key in ending}
        status = "error" if ending["status"] == "ok" else ending["status"]
        reason = f"{ending['reason'] or 'the ranks came to their end'}; {one_line(error)}: make room and run it again"
        return write_record_files(this, known | {"status": status, "reason": reason}, (), {})


def write_record_files(this: Plan, ending: dict[str, Any], ranks: Sequence[Rank], extra: dict[str, Any]) -> Record:
    """As write(). Raises OSError."""
    record = build_record(this.config, this.machine, this.layout, this.run_id, ending, ranks, extra)
    steps = record.pop("steps", [])
    this.directory.mkdir(parents=True, exist_ok=True)
    if steps:
        lines = "".join(json.dumps(step) + "\n" for step in steps)
        atomic_write_text(RunFolder(this.directory).steps, lines)
    write_record(this.directory, record)
    return read_record(this.directory)
