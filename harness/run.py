"""One run from its configuration to its record: planned, refused or launched, proven, written down."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from harness import compiling, data, engines, job, launch, layout, records, row, versions, worker
from harness.compose import folder_of
from harness.config import CheckpointingConfig, ModelConfig, RunConfig, StrategyConfig
from harness.data import Corpus
from harness.engines import Widths
from harness.errors import UserError, one_line
from harness.identity import run_id_of
from harness.layout import Layout
from harness.machine import Machine
from harness.measure import native
from harness.plan import fit, memory
from harness.proof import Rank
from harness.records import Record
from harness.refusals import refusals
from harness.verdict import judge

SINGLE = StrategyConfig(name="single")
NOT_ASKED = "not asked for: proof.reference=false"
Say = Callable[[str], None]
Tick = Callable[[Path], None]  # called with the run's folder several times a second while ranks run


@dataclass(frozen=True)
class Plan:
    """A run that can be started, and where it goes."""

    config: RunConfig
    machine: Machine
    layout: Layout
    widths: Widths
    corpus: Corpus
    run_id: str
    directory: Path


def plan(config: RunConfig, machine: Machine, *, is_reference: bool = False) -> Plan:
    """Raises UserError if the configuration is impossible; writes nothing but the corpus to its cache."""
    found = layout.resolve(config.strategy, config.world_size or machine.world_size)
    for problem in problems(config, found, machine):
        raise UserError(problem)
    engine = engines.load(found.engine)
    corpus = data.prepare(config.data, config.train.seq_len)
    run_id = run_id_of(config, machine.kind, found.world_size, corpus.fingerprint)
    folder = folder_of(config.to_dict()) / ("references" if is_reference else "")
    return Plan(config, machine, found, engine.widths(config, found), corpus, run_id, folder / run_id)


def problems(config: RunConfig, found: Layout, machine: Machine) -> Iterator[str]:
    """Every reason why this configuration cannot be run as this layout, a line each."""
    yield from refusals(config, found)
    yield from compiling.refusals(config, found, machine)
    yield from engines.load(found.engine).refusals(config, found, machine)


@dataclass(frozen=True)
class Reference:
    """The single process to compare with: its rank file, or a word on why there is none; `ending` if it failed."""

    rank: Rank | None
    word: str
    ending: dict[str, Any] | None = None


def execute(this: Plan, models: Sequence[ModelConfig], tick: Tick, say: Say, entry: Callable[[str], None]) -> Record:
    """The run's record: the one on file if it is `ok`, proven as asked and made by this code, else a new one.

    `entry` is what every rank runs, harness.worker.main; `models` are those named when a smaller one would fit.
    """
    with alone(this, say):
        stored = recorded(this, say)
        if stored is not None:
            return stored
        refused = unfit(this, models)
        if refused:
            return write(this, {"status": "refused", "reason": refused})
        reference = reference_of(this, models, tick, say)
        if reference.ending is not None:
            return write(this, reference.ending)
        return start(this, entry, tick, say, reference)


@contextmanager
def alone(this: Plan, say: Say) -> Iterator[None]:
    """Keeps other parents from this run's folder; the operating system lets go when the holder dies."""
    locks = this.directory.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{this.run_id}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{this.run_id} is being run by another command: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def recorded(this: Plan, say: Say) -> Record | None:
    """The record that need not be made again; one that must is said, with the reason."""
    if this.config.force or not (this.directory / records.RECORD_FILE).exists():
        return None
    try:
        record = records.read_record(this.directory)
    except UserError as error:
        say(f"{this.run_id} is run again: {error}")
        return None
    if record["row"]["status"] != "ok":
        return None
    lacking = versions.is_stale(record, versions.versions()) or unproven(this, record)
    if lacking:
        say(f"{this.run_id} is run again, its record is stale: {'; '.join(lacking)}")
        return None
    say(f"{this.run_id} is recorded; force=true runs it again")
    return record


def unproven(this: Plan, record: Record) -> list[str]:
    """What an `ok` record lacks of what is asked now: a comparison, a tighter bound, memory that can be counted."""
    row, asked = record["row"], this.config.proof
    lacking = []
    if asked.reference and record["proof"]["reference"] == NOT_ASKED:
        lacking.append("it was not compared with a reference")
    for column, bounds in (("loss_deviation", asked.loss_bound), ("grad_deviation", asked.grad_bound)):
        value = row.get(column)
        if asked.reference and value is not None and not value <= bounds[this.config.precision.name]:
            lacking.append(f"{column} {value:.2e} is above the bound asked for now")
    if row["peak_allocated_bytes"] is None and native.compiler_problem() is None:
        lacking.append("its memory was not counted")
    if this.config.measure.memory_snapshot and not job.snapshot_file(this.directory, 0).exists():
        lacking.append("no snapshot of its memory was kept")
    return lacking


def writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"results_dir: {folder} cannot be written ({error.strerror}): choose another folder") from None


def unfit(this: Plan, models: Sequence[ModelConfig]) -> str | None:
    """Why the run does not fit this machine, with the arithmetic; preflight=false lifts what is only predicted."""
    machine, ranks = this.machine, this.layout.world_size
    if machine.device == "cuda" and ranks > machine.devices:
        return f"world_size={ranks} needs {ranks} CUDA devices, {machine.devices} are there: choose {machine.devices}"
    if not this.config.preflight:
        return None

    def accepts(changed: RunConfig, other: Layout) -> bool:
        """Whether that world makes this layout of the strategy, and it can be run."""
        try:
            made = layout.resolve(changed.strategy, other.world_size)
        except UserError:
            return False
        return made == other and not any(problems(changed, other, machine))

    return fit.refusal(
        this.config,
        this.layout,
        this.widths,
        available_bytes=machine.available_bytes(ranks),
        ranks_on_host=ranks,
        device=machine.device,
        models=models,
        host_available_bytes=machine.host_free_bytes,
        accepts=accepts,
    )


def reference_of(this: Plan, models: Sequence[ModelConfig], tick: Tick, say: Say) -> Reference:
    """The single process that trains the same, run once a comparison and kept."""
    if not this.config.proof.reference:
        return Reference(None, NOT_ASKED)
    if this.config.model.dropout:
        return Reference(None, f"no other run drops the same: model.dropout={this.config.model.dropout}")
    config = dataclasses.replace(
        this.config, strategy=SINGLE, checkpointing=CheckpointingConfig("none"), world_size=None, repeat=0, force=False
    )
    plain = dataclasses.replace(config.train, loss_chunks=1, fused_optimizer=True, compile=False)
    config = dataclasses.replace(config, train=plain, proof=dataclasses.replace(config.proof, reference=False))
    single = plan(config, this.machine, is_reference=True)
    refused = unfit(single, models)
    if refused:
        return Reference(None, f"skipped, the single process does not fit: {refused}")
    with alone(single, say):
        record = recorded(single, lambda _: None)
        ranks = row.read_ranks(single.directory, 1)
        if record is None or not ranks:
            say(f"reference {single.run_id}")
            record = start(single, worker.main, tick, say, Reference(None, NOT_ASKED))
            ranks = row.read_ranks(single.directory, 1)
    status, reason = record["row"]["status"], record["row"]["reason"]
    if status != "ok":
        ending = {"status": status, "reason": f"nothing to compare with, the single process failed: {reason}"}
        return Reference(None, "failed", ending)
    return Reference(ranks[0], f"compared with {single.run_id}")


def start(this: Plan, entry: Callable[[str], None], tick: Tick, say: Say, reference: Reference) -> Record:
    """Runs the ranks and writes the record, whatever their end."""
    shutil.rmtree(this.directory, ignore_errors=True)
    (this.directory / "ranks").mkdir(parents=True)
    began = datetime.now(UTC)
    try:
        made, notes = prepare(this)
    except (RuntimeError, OSError, UserError) as error:
        return write(this, {"status": "error", "reason": f"before any rank was started: {error}"})
    for note in notes:
        say(note)
    made.write(this.directory)
    world_size = this.layout.world_size
    outcome = launch.launch(
        entry,
        this.directory,
        world_size,
        device=this.machine.device,
        timeout_seconds=this.config.timeout_seconds,
        hang_seconds=this.config.hang_seconds,
        on_tick=lambda: tick(this.directory),
    )
    ranks = row.read_ranks(this.directory, world_size)
    ending: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason}
    extra: dict[str, Any] = {}
    if outcome.status == "ok":
        ending, extra = judge(this.config, this.layout, this.widths, ranks, reference.rank, reference.word)
    else:
        ending |= row.ended(this.directory, world_size, outcome, ranks)
    ending |= {"started_at": began.isoformat(), "seconds": outcome.seconds}
    return write(this, ending, ranks, extra | {"notes": notes})


def prepare(this: Plan) -> tuple[job.Job, list[str]]:
    """The run file, with what must be built before ranks start; and words on what could not be."""
    notes, allocator = [], None
    cache = Path(this.config.data.cache).expanduser()
    if this.machine.device == "cpu":
        try:
            allocator = str(native.build_allocator(cache))
        except (RuntimeError, UserError) as error:
            notes.append(f"memory is not counted: {one_line(error)}")
    variables = engines.load(this.layout.engine).environment(this.layout, this.machine, cache)
    threads = launch.threads_per_rank(this.layout.world_size // this.machine.nodes)
    return job.Job(
        this.run_id, this.config, this.layout, this.corpus, this.machine.device, threads, allocator, variables
    ), notes


def write(
    this: Plan, ending: dict[str, Any], ranks: Sequence[Rank] = (), extra: dict[str, Any] | None = None
) -> Record:
    """Writes record.json and, where there are steps, steps.jsonl beside it."""
    if not this.config.train.compile:  # what a compiled layer keeps and makes is the compiler's choice
        ending |= memory.predicted(this.config, this.layout, this.widths, this.machine.device)
    extra = (extra or {}) | {"corpus": this.corpus.fingerprint}
    record = row.record(this.config, this.machine, this.layout, this.run_id, ending, ranks, extra)
    steps = record.pop("steps", [])
    this.directory.mkdir(parents=True, exist_ok=True)
    if steps:
        lines = "".join(json.dumps(step) + "\n" for step in steps)
        records.atomic_write_text(this.directory / "steps.jsonl", lines)
    records.write_record(this.directory, record)
    return records.read_record(this.directory)
