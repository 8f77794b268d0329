"""One run from its configuration to its record: planned, refused or launched, proven, written down."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    compiling,
    data,
    dominated,
    engines,
    job,
    launch,
    layout,
    locks,
    memory_budget,
    records,
    room,
    row,
    stored,
)
from harness.compose import folder_of
from harness.config import CheckpointingConfig, ModelConfig, RunConfig, StrategyConfig
from harness.data import Corpus
from harness.engines import Widths
from harness.errors import UserError, one_line
from harness.identity import run_id_of
from harness.layout import Layout
from harness.machine import Machine, as_it_is_now
from harness.measure import native
from harness.plan import fit, memory
from harness.proof import Rank
from harness.rank import work
from harness.records import Record
from harness.refusals import refusals
from harness.stored import NOT_ASKED, STARTED, Say
from harness.team import Team
from harness.verdict import judge

SINGLE = StrategyConfig(name="single")
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

    @property
    def folder(self) -> Path:
        """The comparison's."""
        return folder_of(self.config.to_dict())

    @property
    def nodes(self) -> int:
        return self.machine.nodes_of(self.layout.world_size)


@dataclass(frozen=True)
class Means:
    """What a run is made with."""

    entry: Callable[[str], None] = work  # what every rank runs; the tests have others
    models: Sequence[ModelConfig] = ()  # named when a smaller one would fit
    tick: Tick = lambda _: None
    say: Say = lambda _: None
    team: Team | None = None  # other nodes, where the machine is more than this one


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
    yield from machine.refusals(found.world_size)
    yield from compiling.refusals(config, found, machine)
    yield from memory_budget.refusals(config, machine)
    yield from engines.load(found.engine).refusals(config, found, machine)


@dataclass(frozen=True)
class Reference:
    """The single process to compare with: its rank file, or a word on why there is none; `ending` if it failed."""

    rank: Rank | None
    word: str
    ending: dict[str, Any] | None = None


def execute(this: Plan, means: Means) -> Record | None:
    """The run's record: the one on file if that stands, else a new one. None: another command is at it.

    Raises OSError if not even the row of a full disk can be written.
    """
    with locks.alone(this.directory, wait=False) as is_mine:
        return recorded(this, means) if is_mine else None


def recorded(this: Plan, means: Means) -> Record:
    """As execute(), with nobody else at this run."""
    record = stored.standing(this.config, this.directory, means.say)
    if record is not None:
        return record
    this = dataclasses.replace(this, machine=as_it_is_now(this.machine, this.config.cluster))
    why_not = unfit(this, means.models) or dominated.reason(
        this.config, this.layout, this.widths, this.machine, this.directory
    )
    if why_not:
        return refuse(this, why_not)
    reference = reference_of(this, means)
    if reference.ending is not None:
        return write(this, reference.ending)
    return start(this, means, reference)


def refuse(this: Plan, reason: str) -> Record:
    """The row that says so; the one on file if that is still a refusal, whatever the figures of the moment."""
    return stored.refusal(this.directory, this.config.force) or write(this, {"status": "refused", "reason": reason})


def fits(this: Plan) -> bool:
    """Whether it is predicted to fit the machine as it is now."""
    return unfit(dataclasses.replace(this, machine=as_it_is_now(this.machine, this.config.cluster)), ()) is None


def unfit(this: Plan, models: Sequence[ModelConfig]) -> str | None:
    """Why the run does not fit this machine, with the arithmetic; preflight=false lifts what is only predicted."""
    machine, ranks = this.machine, this.layout.world_size
    if machine.device == "cuda" and ranks > machine.devices * machine.nodes:
        there = machine.devices * machine.nodes
        return f"world_size={ranks} needs {ranks} CUDA devices, {there} are there: choose {there}"
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
        available_bytes=machine.available_bytes(ranks // this.nodes),
        ranks_on_host=ranks // this.nodes,
        device=machine.device,
        models=models,
        host_available_bytes=machine.host_free_bytes,
        accepts=accepts,
    )


def reference_of(this: Plan, means: Means) -> Reference:
    """The single process that trains the same, run once a comparison and kept."""
    if not this.config.proof.reference:
        return Reference(None, NOT_ASKED)
    if this.config.model.dropout:
        return Reference(None, f"no other run drops the same: model.dropout={this.config.model.dropout}")
    single = single_of(this)
    refused = unfit(single, means.models)
    if refused:
        return Reference(None, f"skipped, the single process does not fit: {refused}")
    with locks.alone(single.directory):
        record = stored.standing(single.config, single.directory, lambda _: None)
        if record is None or (record["row"]["status"] == "ok" and not reference_rank(single)):
            means.say(f"reference {single.run_id}")
            alone = dataclasses.replace(means, entry=work)
            record = start(single, alone, Reference(None, NOT_ASKED))
        rank = reference_rank(single)
    status, reason = record["row"]["status"], record["row"]["reason"]
    if status == "oom":
        return Reference(None, f"skipped, the single process ran out of memory: {reason}")
    if status != "ok" or rank is None:
        ending = {"status": status, "reason": f"nothing to compare with, the single process failed: {reason}"}
        return Reference(None, "failed", ending)
    return Reference(rank, f"compared with {single.run_id}")


def single_of(this: Plan) -> Plan:
    """The reference's plan: one process on one node, with nothing that only makes a run cheaper."""
    config = dataclasses.replace(
        this.config, strategy=SINGLE, checkpointing=CheckpointingConfig("none"), world_size=None, repeat=0, force=False
    )
    plain = dataclasses.replace(config.train, loss_chunks=1, fused_optimizer=True, compile=False)
    config = dataclasses.replace(config, train=plain, proof=dataclasses.replace(config.proof, reference=False))
    unbounded = dataclasses.replace(config.cluster, memory_budget=None)  # it is proof, and no run of the comparison
    config = dataclasses.replace(config, cluster=unbounded)
    return plan(config, this.machine, is_reference=True)


def reference_rank(single: Plan) -> Rank | None:
    """What the single process wrote; None if that is gone or damaged."""
    try:
        return next(iter(row.read_ranks(single.directory, 1)), None)
    except ValueError:
        return None


def start(this: Plan, means: Means, reference: Reference) -> Record:
    """Runs the ranks and writes the record, whatever their end; until then one that tells of a command that died."""
    began = {"started_at": datetime.now(UTC).isoformat()}
    try:
        write(this, {"status": "interrupted", "reason": STARTED} | began)
        stored.clear(this.directory)
        (this.directory / "ranks").mkdir()
        made, notes = prepare(this)
        made.write(this.directory)
    except (RuntimeError, OSError, UserError) as error:
        return write(this, {"status": "error", "reason": f"before any rank was started: {one_line(error)}"} | began)
    for note in notes:
        means.say(note)
    world_size = this.layout.world_size
    ranks_of = partial(means.team.launch, this.nodes) if means.team else launch.launch
    outcome = ranks_of(
        means.entry,
        this.directory,
        world_size,
        device=this.machine.device,
        timeout_seconds=this.config.timeout_seconds,
        hang_seconds=this.config.hang_seconds,
        on_tick=lambda: means.tick(this.directory),
    )
    ending: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason}
    extra: dict[str, Any] = {}
    try:
        ranks = row.read_ranks(this.directory, world_size)
    except ValueError as error:
        ranks, ending = [], {"status": "error", "reason": f"what its ranks wrote is damaged: {one_line(error)}"}
    if ending["status"] == "ok":
        ending, extra = judge(this.config, this.layout, this.widths, ranks, reference.rank, reference.word)
    if ending["status"] != "ok":
        at = {"phase": ending["phase"]} if "phase" in ending else {}
        ending |= row.ended(this.config, this.directory, world_size, outcome, ranks) | at
    ending |= began | {"seconds": outcome.seconds}
    return write(this, ending, ranks, extra | {"notes": notes})


def prepare(this: Plan) -> tuple[job.Job, list[str]]:
    """The run file, with what must be built before ranks start; and words on what could not be."""
    notes, allocator = [], None
    cache = Path(this.config.data.cache).expanduser()
    if this.machine.device == "cpu":
        try:
            allocator = str(native.build_allocator(cache))
        except (RuntimeError, UserError) as error:
            if this.config.cluster.memory_budget is not None:  # nothing would refuse what is beyond it
                raise
            notes.append(f"memory is not counted: {one_line(error)}")
    variables = engines.load(this.layout.engine).environment(this.layout, this.machine, cache)
    threads = launch.threads_per_rank(this.layout.world_size // this.nodes)
    return job.Job(
        this.run_id, this.config, this.layout, this.corpus, this.machine.device, threads, allocator, variables
    ), notes


def write(
    this: Plan, ending: dict[str, Any], ranks: Sequence[Rank] = (), extra: dict[str, Any] | None = None
) -> Record:
    """Writes record.json and, where there are steps, steps.jsonl beside it. On a full disk the row alone."""
    if not this.config.train.compile:  # what a compiled layer keeps and makes is the compiler's choice
        ending |= memory.predicted(this.config, this.layout, this.widths, this.machine.device)
    extra = (extra or {}) | {"corpus": this.corpus.fingerprint}
    try:
        return written(this, ending, ranks, extra)
    except OSError as error:
        if not room.is_full(error):
            raise
        room.give(this.folder)
        known = {key: ending[key] for key in ("started_at", "seconds", "phase") if key in ending}
        status = "error" if ending["status"] == "ok" else ending["status"]
        reason = f"{ending['reason'] or 'the ranks came to their end'}; {one_line(error)}: make room and run it again"
        return written(this, known | {"status": status, "reason": reason}, (), {})


def written(this: Plan, ending: dict[str, Any], ranks: Sequence[Rank], extra: dict[str, Any]) -> Record:
    """As write(). Raises OSError."""
    record = row.record(this.config, this.machine, this.layout, this.run_id, ending, ranks, extra)
    steps = record.pop("steps", [])
    this.directory.mkdir(parents=True, exist_ok=True)
    if steps:
        lines = "".join(json.dumps(step) + "\n" for step in steps)
        records.atomic_write_text(this.directory / "steps.jsonl", lines)
    records.write_record(this.directory, record)
    return records.read_record(this.directory)
