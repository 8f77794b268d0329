"""The machine that a simulation is for, whether it or a virtual run can be made, and the ranks that they run."""

from collections.abc import Callable, Iterator

from harness.config.from_dict import ConfigValues, from_dict
from harness.config.schema import ClusterConfig, RunConfig
from harness.cost_model.deepspeed_zero import fullest_rank
from harness.cost_model.rank_memory import highest_peak, rank_steps
from harness.engines.base import drives_several_devices, load_engine
from harness.hardware.described_cluster import described_cluster, described_machine
from harness.hardware.machine import Machine, torch_release
from harness.layout.layout import Layout, refusals
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


def simulation_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield every reason why this layout cannot be simulated, or a rank of it cannot run alone, a line each."""
    is_simulated, is_virtual = config.launch == "simulated", config.launch == "virtual"
    if is_simulated and config.cluster.hardware is not None:
        problem = described_cluster(config.cluster).world_size_problem(layout.world_size)
        if problem:
            yield problem
    rank, last_rank = config.simulate.rank, layout.world_size - 1
    rules = {
        "simulated_compile": is_simulated and config.train.compile,
        "played_rank": (is_simulated or is_virtual) and isinstance(rank, int) and rank > last_rank,
        "virtual_release": is_virtual and torch_release() < FILLING_RELEASE,
        "virtual_nodes": is_virtual and config.cluster.nodes > 1,
        "virtual_devices": is_virtual and drives_several_devices(layout),
    }
    yield from refusals(rules, config, layout, last_rank=last_rank)


def simulated_ranks(config: RunConfig, layout: Layout, machine: Machine) -> tuple[int, ...]:
    """Return the ranks that simulate.rank names; one of a pipeline's stage stands for all that share the stage.

    Under DeepSpeed's stages 1 and 2 it is one with the highest peak.
    """
    rank = config.simulate.rank
    if isinstance(rank, int):
        return (rank,)
    widths = load_engine(layout.engine).state_widths(config, layout)
    if layout.uses_deepspeed_zero and layout.zero_stage < 3:
        return (fullest_rank(config, layout, widths, split_into_stages(config.model, layout)),)
    stage_ranks = layout.world_size // layout.pp
    if rank == "all":
        return tuple(range(0, layout.world_size, stage_ranks))
    if layout.pp == 1 or not model_profile(config.model).is_project_decoder:
        return (0,)
    return (highest_peak(rank_steps(config, layout, widths, machine.device)).pp_rank * stage_ranks,)
