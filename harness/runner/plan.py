"""The plan of a run: a configuration resolved for a machine, and whether it can run and fit there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec

from harness.config.command import CommandConfig
from harness.config.fingerprint import make_run_id
from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.config.stack import load_stack
from harness.config.strategy import V_SCHEDULES
from harness.cost_model.fits import Choices, Room, Variant, memory_problem
from harness.cost_model.memory import MemoryEstimate, estimate_memory
from harness.cost_model.prediction import Prediction
from harness.cost_model.rank_memory import fullest_rank
from harness.data.corpus import Corpus, prepare_corpus
from harness.engines.base import (
    device_count,
    drives_several_devices,
    fully_sharded_preset,
    load_engine,
)
from harness.hardware.machine import (
    DescribedCluster,
    Machine,
    described_cluster,
    run_hardware,
    torch_release,
)
from harness.launcher.limits import limit_problem
from harness.layout.compatibility import compiler_incompatibilities, incompatibilities, trains_packed
from harness.layout.layout import Layout, resolve_layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages
from harness.layout.refusals import refusals
from harness.layout.state_widths import StateWidths
from harness.records.run_folder import ComparisonFolder, RunFolder, comparison_folder
from harness.runner.resolve import computes_bf16, load_precision_preset, load_strategy_preset, refresh_machine
from harness.util import native_build
from harness.util.text import UserError, format_bytes

# The release of torch whose pipelines and choice of attention's kernels are played, and the first whose fake process
# group fills what a rank gets by any collective (FakeProcessGroup.hpp).
PLAYED_RELEASE = (2, 13)

# The first release whose pipelines send single messages one by one (_batch_p2p). Batches share NCCL's stream of a
# group, in which the stages of interleaved_1f1b wait for messages that they do not need yet.
UNBATCHED_RELEASE = (2, 12)


@dataclass(frozen=True)
class RunPlan:
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

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The predicted memory of the fullest rank."""
        return estimate_memory(self.config, self.layout, self.widths, self.machine.device)

    @cached_property
    def prediction(self) -> Prediction | None:
        """What is predicted of the run's step on the hardware of its devices.

        None where that is not described, or its rate in the dtype of compute or the model's operators are not known.
        """
        hardware = run_hardware(self.machine, self.config.cluster, self.nodes)
        if hardware is None or not model_profile(self.config.model).is_project_decoder:
            return None
        cluster = DescribedCluster(
            self.config.cluster.name, self.nodes, self.ranks_per_node, hardware, self.machine.device
        )
        widths = load_engine(self.layout.engine).state_widths
        prediction = Prediction(self.config, self.layout, cluster, load_stack("harness"), widths)
        try:
            prediction.time  # noqa: B018
        except UserError:
            return None
        return prediction

    @property
    def room(self) -> Room:
        """The memory that is free for the run's ranks on each of its hosts."""
        return Room(
            self.machine.available_bytes(self.devices),
            self.processes_per_node,
            is_shared=self.machine.device == "cpu",
            budget_bytes=self.config.cluster.memory_budget_bytes,
            host_bytes=self.machine.host_free_bytes,
        )

    @property
    def nodes(self) -> int:
        """The number of the machine's nodes that the run uses."""
        return self.machine.nodes_needed(self.layout.world_size)

    @property
    def devices(self) -> int:
        """The number of each node's devices that the run uses."""
        if self.config.launch == "virtual":
            return 1
        return device_count(self.config, self.layout, self.machine) // self.nodes

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks that share a node, whether or not this machine runs all of them at once."""
        ranks, gpus = self.layout.world_size // self.nodes, self.config.cluster.gpus_per_node
        return min(ranks, gpus) if self.config.launch == "virtual" and gpus else ranks

    @property
    def processes_per_node(self) -> int:
        """The number of ranks that this machine runs at once."""
        return 1 if self.config.launch == "virtual" else self.ranks_per_node

    @property
    def ranks_alone(self) -> tuple[int, ...]:
        """The ranks that simulate.rank names; one of a pipeline's stage stands for all that share the stage.

        Under DeepSpeed's stages 1 and 2 it is one with the highest peak.
        """
        config, layout, rank = self.config, self.layout, self.config.simulate.rank
        if isinstance(rank, int):
            return (rank,)
        if layout.uses_deepspeed_zero and layout.zero_stage < 3:
            return (fullest_rank(config, layout, self.widths, split_into_stages(config.model, layout)),)
        if rank == "all":
            return tuple(range(0, layout.world_size, layout.world_size // layout.pp))
        is_known = layout.pp > 1 and model_profile(config.model).is_project_decoder
        return (self.memory.rank if is_known else 0,)


def make_plan(
    config: RunConfig, machine: Machine, command: CommandConfig | None = None, *, is_reference: bool = False
) -> RunPlan:
    """Return the plan of a configuration; the only file that is written is the corpus in its cache.

    Raises UserError with every reason if the configuration is impossible.
    """
    command = command or CommandConfig()
    layout = resolve_layout(config.strategy, config.world_size or machine.world_size)
    if problems := [*find_problems(config, layout, machine)]:
        raise UserError("; ".join(problems))
    widths = load_engine(layout.engine).state_widths(config, layout)
    corpus = prepare_corpus(config.data, config.train.seq_len)
    run_id = make_run_id(config, machine.fingerprint, device_count(config, layout, machine), corpus.fingerprint)
    comparison = comparison_folder(command.name, command.results_dir)
    folder = (ComparisonFolder(comparison.references) if is_reference else comparison).run(run_id)
    return RunPlan(config, command, machine, layout, widths, corpus, run_id, folder)


FLOAT8_CAPABILITY = (8, 9)  # of CUDA, from which on devices have units for float8


def find_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield every reason why this configuration cannot run with this layout on this machine, a line each."""
    yield from incompatibilities(config, layout)
    yield from compiler_incompatibilities(config, layout)
    yield from machine.world_size_problems(layout.world_size)
    yield from simulation_problems(config, layout)
    libraries = {rule.library for rule in config.optimizer.spec.rules}
    for library in sorted(name for name in libraries if find_spec(name) is None):
        yield from refusals({"optimizer_library": True}, config, layout, library=library)
    adapter = config.model.adapter
    libraries = {"peft", "bitsandbytes"} if adapter.is_quantized else {"peft"}
    rules = {
        "adapter_library": adapter.is_enabled and None in map(find_spec, libraries),
        "adapter_planned": adapter.is_quantized and not trains_packed(config, layout),
        "recipe_library": config.precision.has_recipe and find_spec("torchao") is None,
        "recipe_planned": config.precision.is_planned_only,
    }
    yield from refusals(rules, config, layout, library="qlora" if adapter.is_quantized else "peft")
    if config.launch != "simulated":
        yield from machine_problems(config, layout, machine)
    yield from load_engine(layout.engine).unsupported(config, layout, machine)


def simulation_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield every reason why this layout cannot be simulated, or a rank of it cannot run alone, a line each."""
    is_simulated, is_virtual = config.launch == "simulated", config.launch == "virtual"
    if is_simulated and config.cluster.hardware is not None:
        problem = described_cluster(config.cluster).world_size_problem(layout.world_size)
        if problem:
            yield problem
    rank, last_rank, release = config.simulate.rank, layout.world_size - 1, torch_release()
    rules = {
        "simulated_optimizer": is_simulated and any(rule.library != "torch" for rule in config.optimizer.spec.rules),
        "simulated_compile": is_simulated and config.train.compile,
        "played_routing": (is_simulated or is_virtual) and layout.ep_enabled and config.model.routing != "balanced",
        "played_rank": (is_simulated or is_virtual) and isinstance(rank, int) and rank > last_rank,
        "simulated_release": is_simulated and release != PLAYED_RELEASE,
        "virtual_release": is_virtual
        and release < PLAYED_RELEASE
        and (layout.pp > 1 or layout.cp > 1 or layout.sequence_parallel or layout.ep_enabled),
        "virtual_nodes": is_virtual and config.cluster.nodes > 1,
        "played_devices": config.launch != "processes" and drives_several_devices(layout),
    }
    yield from refusals(rules, config, layout, last_rank=last_rank)


def machine_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield why this machine does not compile the layers, compute in the precision, or enforce the memory budget."""
    capability, budget = machine.compute_capability, config.cluster.memory_budget_bytes
    compiler = native_build.compiler_problem() if machine.device == "cpu" else None
    triton = native_build.triton_problem(capability) if machine.device == "cuda" else None
    is_slow = capability is not None and not computes_bf16("cuda", capability)
    is_batched = machine.device == "cuda" and torch_release() < UNBATCHED_RELEASE
    rules = {
        "compiled_cpu": config.train.compile and compiler is not None,
        "compiled_gpu": config.train.compile and triton is not None,
        "recipe_device": capability is not None and capability < FLOAT8_CAPABILITY and config.precision.has_recipe,
        "emulated_precision": is_slow and config.precision.compute == "bfloat16",
        "interleaved_release": is_batched and layout.schedule in ("interleaved_1f1b", *V_SCHEDULES) and layout.pp > 2,
        "budget_compiler": budget is not None and compiler is not None,
        "budget_device": budget is not None and machine.device_bytes is not None and budget > machine.device_bytes,
    }
    device_bytes = format_bytes(machine.device_bytes or 0)
    values = {"machine": machine, "compiler": compiler, "triton": triton, "device_bytes": device_bytes}
    yield from refusals(rules, config, layout, **values)


def fits_now(plan: RunPlan) -> bool:
    """Return whether the run is predicted to fit the machine as it is at this moment."""
    if plan.config.launch != "simulated":
        plan = replace(plan, machine=refresh_machine(plan.machine, plan.config.cluster))
    return capacity_problem(plan, ()) is None


def capacity_problem(plan: RunPlan, models: Sequence[ModelConfig]) -> str | None:
    """Return why the run does not fit this machine, with the arithmetic, or None if it fits.

    preflight=false skips what is only predicted. `models` are those that may be suggested instead.
    """
    machine = plan.machine
    if machine.device == "cuda" and plan.devices > machine.devices:
        needed, devices = plan.devices * plan.nodes, machine.devices * plan.nodes
        return f"world_size={needed} needs {needed} CUDA devices, and {devices} are available: choose {devices}"
    problem = machine.device_problem(plan.devices) or limit_problem(plan.processes_per_node)
    if problem:
        return problem
    if not plan.command.preflight:
        return None
    return memory_problem(plan.config, plan.layout, plan.memory, plan.room, remedy_choices(plan, models))


def remedy_choices(plan: RunPlan, models: Sequence[ModelConfig]) -> Choices:
    """Return what may be chosen instead of a run that does not fit this machine."""
    machine, strategy, room = plan.machine, plan.config.strategy, plan.room

    def plan_variant(changed: RunConfig, world_size: int | None) -> Variant | None:
        """Return the changed configuration as this machine, or more such machines, would run it."""
        try:
            layout = resolve_layout(changed.strategy, world_size or changed.world_size or machine.world_size)
            is_as_wide = world_size is None or layout.world_size == world_size
            if not is_as_wide or any(find_problems(changed, layout, machine)):
                return None
        except UserError:
            return None
        ranks = room.ranks
        if changed.strategy.name != strategy.name:  # otherwise more ranks are on more hosts
            ranks = max(1, ranks * layout.world_size // plan.layout.world_size)
        memory = estimate_memory(
            changed, layout, load_engine(layout.engine).state_widths(changed, layout), machine.device
        )
        return Variant(layout, memory, replace(room, ranks=ranks))

    return Choices(
        plan_variant,
        0 if room.device_holds(plan.memory) else plan.memory.process_bytes,
        models,
        sharded=(load_strategy_preset(fully_sharded_preset(strategy.engine)),),
        precisions=tuple(map(load_precision_preset, ("bf16_mixed", "bf16"))),
        local_ranks=machine.devices if machine.device == "cuda" else 0,
        offloads=machine.device == "cuda",
    )
