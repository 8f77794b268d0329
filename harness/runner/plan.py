"""The plan of a run: a configuration resolved for a machine, and whether it can run and fit there."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.config.command import CommandConfig
from harness.config.fingerprint import make_run_id
from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.cost_model import capacity
from harness.data.corpus import Corpus, prepare_corpus
from harness.engines.base import load_engine
from harness.hardware.machine import Machine
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout, resolve_layout
from harness.layout.state_widths import StateWidths
from harness.records.run_folder import ComparisonFolder, RunFolder, comparison_folder
from harness.runner import preflight
from harness.runner.local_machine import refresh_machine
from harness.util.errors import UserError


@dataclass(frozen=True)
class Plan:
    """A run that can be started, and the folder that it is recorded in."""

    config: RunConfig
    command: CommandConfig
    machine: Machine
    layout: Layout
    widths: StateWidths
    corpus: Corpus
    run_id: str
    folder: RunFolder

    @property
    def comparison(self) -> ComparisonFolder:
        """The folder of the comparison that the run, or the run it is the reference of, belongs to."""
        return comparison_folder(self.command.name, self.command.results_dir)

    @property
    def nodes(self) -> int:
        """The number of the machine's nodes that the run uses."""
        return self.machine.nodes_needed(self.layout.world_size)


def make_plan(
    config: RunConfig, machine: Machine, command: CommandConfig | None = None, *, is_reference: bool = False
) -> Plan:
    """Return the plan of a configuration; the only file that is written is the corpus in its cache.

    Raises UserError if the configuration is impossible.
    """
    command = command or CommandConfig()
    layout = resolve_layout(config.strategy, config.world_size or machine.world_size)
    for problem in find_problems(config, layout, machine):
        raise UserError(problem)
    widths = load_engine(layout.engine).state_widths(config, layout)
    corpus = prepare_corpus(config.data, config.train.seq_len)
    run_id = make_run_id(config, machine.fingerprint, layout.world_size, corpus.fingerprint)
    comparison = comparison_folder(command.name, command.results_dir)
    folder = RunFolder(comparison.references / run_id) if is_reference else comparison.run(run_id)
    return Plan(config, command, machine, layout, widths, corpus, run_id, folder)


def find_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield every reason why this configuration cannot run with this layout on this machine, a line each."""
    if config.launch != "processes":
        yield f"launch={config.launch} is not available yet: choose launch=processes"
    yield from incompatibilities(config, layout)
    yield from machine.world_size_problems(layout.world_size)
    yield from preflight.compile_problems(config, layout, machine)
    yield from preflight.budget_problems(config, machine)
    yield from load_engine(layout.engine).unsupported(config, layout, machine)


def fits(plan: Plan) -> bool:
    """Return whether the run is predicted to fit the machine as it is at this moment."""
    machine = refresh_machine(plan.machine, plan.config.cluster)
    return capacity_problem(dataclasses.replace(plan, machine=machine), ()) is None


def capacity_problem(plan: Plan, models: Sequence[ModelConfig]) -> str | None:
    """Return why the run does not fit this machine, with the arithmetic, or None if it fits.

    preflight=false skips what is only predicted. `models` are those that may be suggested instead.
    """
    machine, world_size = plan.machine, plan.layout.world_size
    devices = machine.devices * machine.nodes
    if machine.device == "cuda" and world_size > devices:
        return f"world_size={world_size} needs {world_size} CUDA devices, and {devices} are available: choose {devices}"
    if not plan.command.preflight:
        return None

    def accepts(changed: RunConfig, layout: Layout) -> bool:
        """Return whether the changed strategy resolves to this layout, which can then be run."""
        try:
            resolved = resolve_layout(changed.strategy, layout.world_size)
        except UserError:
            return False
        return resolved == layout and not any(find_problems(changed, layout, machine))

    ranks_on_host = world_size // plan.nodes
    return capacity.capacity_problem(
        plan.config,
        plan.layout,
        plan.widths,
        available_bytes=machine.available_bytes(ranks_on_host),
        ranks_on_host=ranks_on_host,
        device=machine.device,
        models=models,
        host_available_bytes=machine.host_free_bytes,
        accepts=accepts,
    )
