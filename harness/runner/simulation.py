"""The machine that a simulation is for, whether it or a virtual run can be made, and the ranks that they run."""

from collections.abc import Callable, Iterator

from harness.config.from_dict import ConfigValues, from_dict
from harness.config.schema import ClusterConfig, RunConfig
from harness.cost_model.deepspeed_zero import fullest_rank
from harness.cost_model.rank_memory import highest_peak, rank_steps
from harness.engines.base import drives_several_devices, load_engine, unsupported_elsewhere
from harness.hardware.described_cluster import described_cluster, described_machine
from harness.hardware.machine import Machine, torch_release
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages
from harness.runner.local_machine import detect_machine

# The first release of torch whose fake process group fills what a rank gets by a collective (FakeProcessGroup.hpp).
FILLING_RELEASE = (2, 13)


def machine_of_run(values: ConfigValues, detect: Callable[[ClusterConfig], Machine] = detect_machine) -> Machine:
    """Return the machine that composed values are for: the one at hand, which `detect` returns.

    A simulation is for the machine that its cluster describes, if it describes one. Raises UserError.
    """
    cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
    if values.get("launch") != "simulated":
        return detect(cluster)
    return detect_machine(cluster) if cluster.hardware is None else described_machine(described_cluster(cluster))


def simulation_problems(config: RunConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield every reason why a simulation cannot play this layout, a line each."""
    if config.cluster.hardware is not None:
        problem = described_cluster(config.cluster).world_size_problem(layout.world_size)
        if problem:
            yield problem
    if config.train.compile:
        yield "train.compile=true cannot be simulated, as a compiler runs kernels to choose among them: choose false"
    yield from rank_problems(config, layout)
    yield from unsupported_elsewhere(load_engine(layout.engine), config, layout, machine)


def rank_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield why simulate.rank names none of the layout's ranks."""
    rank = config.simulate.rank
    if isinstance(rank, int) and rank >= layout.world_size:
        yield f"simulate.rank={rank} is not one of the {layout.world_size} ranks: choose 0 to {layout.world_size - 1}"


def virtual_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield every reason why a rank of this layout cannot run alone, a line each."""
    yield from rank_problems(config, layout)
    if torch_release() < FILLING_RELEASE:
        yield (
            "launch=virtual needs torch 2.13: the fake process group of earlier releases leaves the results of"
            " reduce-scatters as they were in memory"
        )
    if config.cluster.nodes > 1:
        yield (
            f"cluster.nodes={config.cluster.nodes} with launch=virtual, which runs one rank on this machine: choose 1,"
            " and cluster.gpus_per_node for the ranks that share a node in the predicted time"
        )
    if drives_several_devices(layout):
        yield f"strategy.engine={layout.engine} has one rank, which needs all its devices: choose launch=processes"


def simulated_ranks(config: RunConfig, layout: Layout, machine: Machine) -> tuple[int, ...]:
    """Return the ranks that simulate.rank names; one of a pipeline's stage stands for all that share the stage.

    Under DeepSpeed's stages 1 and 2 it is one with the highest peak.
    """
    rank = config.simulate.rank
    if isinstance(rank, int):
        return (rank,)
    if layout.uses_deepspeed_zero and layout.zero_stage < 3:
        widths = load_engine(layout.engine).state_widths(config, layout)
        return (fullest_rank(config, layout, widths, split_into_stages(config.model, layout)),)
    stage_ranks = layout.world_size // layout.pp
    if rank == "all":
        return tuple(range(0, layout.world_size, stage_ranks))
    if layout.pp == 1 or not model_profile(config.model).is_project_decoder:
        return (0,)
    widths = load_engine(layout.engine).state_widths(config, layout)
    return (highest_peak(rank_steps(config, layout, widths, machine.device)).pp_rank * stage_ranks,)
