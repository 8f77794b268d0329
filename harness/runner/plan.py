"""TODO harness.runner.plan."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.fingerprint import make_run_id
from harness.config.schema import ModelConfig, RunConfig
from harness.cost_model import capacity
from harness.data.corpus import Corpus, prepare_corpus
from harness.engines.base import load_engine
from harness.hardware.machine import Machine
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout, resolve_layout
from harness.layout.state_widths import StateWidths
from harness.records.run_folder import ComparisonFolder, comparison_folder
from harness.runner import preflight
from harness.runner.local_machine import refresh_machine
from harness.util.errors import UserError


@dataclass(frozen=True)
class Plan:
    """A run that can be started, and where it goes."""

    config: RunConfig
    machine: Machine
    layout: Layout
    widths: StateWidths
    corpus: Corpus
    run_id: str
    directory: Path

    @property
    def folder(self) -> Path:
        """The comparison's."""
        return comparison_folder(self.config.to_dict())

    @property
    def nodes(self) -> int:
        return self.machine.nodes_needed(self.layout.world_size)


def make_plan(config: RunConfig, machine: Machine, *, is_reference: bool = False) -> Plan:
    """Raises UserError if the configuration is impossible; writes nothing but the corpus to its cache."""
    found = resolve_layout(config.strategy, config.world_size or machine.world_size)
    for problem in find_problems(config, found, machine):
        raise UserError(problem)
    engine = load_engine(found.engine)
    corpus = prepare_corpus(config.data, config.train.seq_len)
    run_id = make_run_id(config, machine.fingerprint, found.world_size, corpus.fingerprint)
    folder = comparison_folder(config.to_dict())
    if is_reference:
        folder = ComparisonFolder(folder).references
    return Plan(config, machine, found, engine.state_widths(config, found), corpus, run_id, folder / run_id)


def find_problems(config: RunConfig, found: Layout, machine: Machine) -> Iterator[str]:
    """Every reason why this configuration cannot be run as this layout, a line each."""
    yield from incompatibilities(config, found)
    yield from machine.world_size_problems(found.world_size)
    yield from preflight.compile_problems(config, found, machine)
    yield from preflight.budget_problems(config, machine)
    yield from load_engine(found.engine).unsupported(config, found, machine)


def fits(this: Plan) -> bool:
    """Whether it is predicted to fit the machine as it is now."""
    return (
        capacity_problem(dataclasses.replace(this, machine=refresh_machine(this.machine, this.config.cluster)), ())
        is None
    )


def capacity_problem(this: Plan, models: Sequence[ModelConfig]) -> str | None:
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
            made = resolve_layout(changed.strategy, other.world_size)
        except UserError:
            return False
        return made == other and not any(find_problems(changed, other, machine))

    return capacity.capacity_problem(
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
