"""What can be planned: the candidates of a search, what keeps a layout from a cluster, and what would make it fit.

Candidates are every layout, checkpointing and micro-batch for a model on a world. The cluster need not be at hand.
Imports no torch.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, RunConfig
from harness.config.stack import StackConfig
from harness.config.strategy import MODEL_AXES, V_SCHEDULES, StrategyConfig
from harness.cost_model.fits import Choices, Variant, remedies
from harness.cost_model.prediction import Prediction
from harness.cost_model.stack_memory import stack_problems
from harness.engines.base import load_engine, unsupported_elsewhere
from harness.hardware.machine import DescribedCluster, described_machine
from harness.layout.compatibility import compiler_incompatibilities, incompatibilities
from harness.layout.layout import Layout, resolve_layout
from harness.runner.resolve import load_precision_preset, load_strategy_preset
from harness.util.text import UserError

MOST_TP = 64  # ranks; attention heads and nodes are fewer in every published layout

MOST_CP = 64  # ranks

LEAST_TOKENS = 1024  # of a sequence that a context-parallel rank has; with fewer, its kernels are too small to gain

MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences

VIRTUAL_STAGES = (2, 3, 4, 6, 8)  # of a rank in an interleaved pipeline

CHECKPOINTINGS = (
    CheckpointingConfig("none"),
    CheckpointingConfig("selective"),
    CheckpointingConfig("attention"),
    CheckpointingConfig("every_n", every=2),
    CheckpointingConfig("full"),
)

OFFLOADED = (
    CheckpointingConfig("none", offload_activations=True),
    CheckpointingConfig("full", offload_activations=True),
)

engine_module = cache(load_engine)  # a search asks for few of them often


@dataclass(frozen=True)
class SearchedSpace:
    """What a search may choose from: all settings of the layout that are not fixed to those of the configuration."""

    config: RunConfig
    cluster: DescribedCluster
    stack: StackConfig
    world_size: int
    fixed: Collection[str] = ()  # dotted keys, and groups for all of their values
    wants_host: bool = True  # whether state and activations may be on the host

    @property
    def offloads(self) -> bool:
        """Whether the host is searched, too: if devices have one whose link is known."""
        has_link = self.cluster.hardware.host_bandwidth is not None
        return self.wants_host and self.cluster.device == "cuda" and has_link

    @property
    def fixes_offload(self) -> bool:
        """Whether a fixed setting puts state or activations on the host."""
        of_activations = {"checkpointing", "checkpointing.offload_activations"}.intersection(self.fixed)
        offloads_activations = bool(of_activations) and self.config.checkpointing.offload_activations
        return offloads_activations or self.fixed_values("strategy").get("offload", "none") != "none"

    def fixed_values(self, group: str) -> dict[str, Any]:
        """Return the values of a group's settings that are fixed one by one."""
        values = vars(getattr(self.config, group)).items()
        return {key: value for key, value in values if key != "options" and f"{group}.{key}" in self.fixed}


def has_values(settings: StrategyConfig | CheckpointingConfig, values: Mapping[str, Any]) -> bool:
    """Return whether settings have these values; a degree of -1 stands for any."""
    return all(value in (-1, getattr(settings, key)) for key, value in values.items())


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, smallest first."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def candidates(space: SearchedSpace) -> Iterator[tuple[RunConfig, Layout]]:
    """Yield every candidate with its layout; the rules of a run are not applied yet."""
    config, fixed_strategy, fixed_checkpointing = space.config, *map(space.fixed_values, ("strategy", "checkpointing"))
    offered = CHECKPOINTINGS + (OFFLOADED if space.offloads else ())
    checkpointings = (config.checkpointing,) if "checkpointing" in space.fixed else offered
    allowed = [choice for choice in checkpointings if has_values(choice, fixed_checkpointing)]
    sizes = (config.train.micro_batch,) if "train.micro_batch" in space.fixed else MICRO_BATCHES
    trains = [dataclasses.replace(config.train, micro_batch=size) for size in sizes]
    for strategy in strategies(space):
        if not has_values(strategy, fixed_strategy):
            continue
        layout = resolve_layout(strategy, space.world_size)
        for train, checkpointing in itertools.product(trains, allowed):
            if train.global_batch % (train.micro_batch * layout.dp) == 0:
                changed = dataclasses.replace(config, strategy=strategy, checkpointing=checkpointing, train=train)
                yield changed, layout


def strategies(space: SearchedSpace) -> Iterator[StrategyConfig]:
    """Yield the strategies of a world: all degrees, ZeRO stages, ways of sharding, offloads and schedules.

    Replicas of shards are as large as whole nodes. Context-parallel ranks gather keys or exchange heads, as far as
    the stack does, unless it is fixed.
    """
    config, memory = space.config, space.stack.memory
    offered = ("gather", "ulysses") if memory.exchanges_heads else ("gather",)
    exchanges = (space.config.strategy.context_parallel,) if "strategy.context_parallel" in space.fixed else offered
    layers = config.model.num_hidden_layers
    for degrees in model_degrees(space):
        dp, rest = divmod(space.world_size, math.prod(degrees.values()))
        is_possible = degrees["pp"] <= layers and (memory.has_model_parallelism or dp == space.world_size)
        if rest or not is_possible or config.train.global_batch % dp:
            continue
        is_parallel = (False, True) if degrees["tp"] > 1 else (False,)
        ways, of_cp = shardings(space, dp, **degrees), exchanges if degrees["cp"] > 1 else ("gather",)
        for way, exchange, sequence_parallel in itertools.product(ways, of_cp, is_parallel):
            for schedule, ep in itertools.product(
                _schedules(degrees["pp"], layers, memory.kind, way), expert_degrees(config.model, way)
            ):
                settings = way | schedule | degrees | {"context_parallel": exchange, "ep": ep}
                yield StrategyConfig("search", sequence_parallel=sequence_parallel, **settings)


def model_degrees(space: SearchedSpace) -> Iterator[dict[str, int]]:
    """Return degrees of tensor, context and pipeline parallelism, whether or not they divide the world together.

    A context-parallel rank has enough tokens, unless the degree is fixed.
    """
    model, tokens, world = space.config.model, space.config.train.seq_len, divisors(space.world_size)
    tps = [tp for tp in world if tp <= MOST_TP and not (model.num_key_value_heads % tp or model.intermediate_size % tp)]
    cps = [cp for cp in world if cp == 1 or (cp <= MOST_CP and tokens % (2 * cp) == 0 and LEAST_TOKENS * cp <= tokens)]
    fixed = space.fixed_values("strategy").get("cp", -1)
    degrees = itertools.product(tps, cps if fixed == -1 else [fixed], world)
    return (dict(zip(MODEL_AXES, sizes, strict=True)) for sizes in degrees)


def undivided(space: SearchedSpace) -> str | None:
    """Return why the least tensor-parallel degree of a node that a run would refuse is refused; None if there is none.

    A fixed degree leaves nothing out.
    """
    if not space.stack.memory.has_model_parallelism or "strategy.tp" in space.fixed:
        return None
    for tp in divisors(math.gcd(space.world_size, space.cluster.gpus_per_node)):
        strategy = StrategyConfig("search", tp=tp)
        problems = incompatibilities(dataclasses.replace(space.config, strategy=strategy), resolve_layout(strategy, tp))
        if problem := next((line for line in problems if line.startswith("strategy.tp=")), None):
            return problem
    return None


def expert_degrees(model: ModelConfig, way: Mapping[str, Any]) -> list[int]:
    """Return the degrees of expert parallelism for a way of sharing state: those that divide experts and ranks."""
    divides_elements = way.get("zero_stage") == 1 or way.get("engine") == "deepspeed"  # of all parameters alike
    shards = way.get("dp_shard", 1)
    ranks = shards if shards > 1 else way.get("dp_replicate", 1)
    if not model.num_experts or divides_elements:
        return [1]
    return [ep for ep in divisors(ranks) if model.num_experts % ep == 0]


def _schedules(pp: int, layers: int, kind: str, way: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schedules of a pipeline for a way of sharing state, with the stages of a rank.

    Those that halve backward are of stacks with this project's memory (`kind: harness`). They need parameters that stay
    whole until its second half, and gradients that no wrapper reduces before.
    """
    if pp == 1:
        return [{}]
    interleaved = [size for size in VIRTUAL_STAGES if pp * size <= layers]
    stages_of: dict[str, Sequence[int]] = {"1f1b": (1,), "gpipe": (1,), "interleaved_1f1b": interleaved}
    if kind == "harness" and way.get("zero_stage") != 3 and way.get("data_parallel") != "ddp":
        stages_of |= {"zero_bubble": (1, *interleaved), **dict.fromkeys(V_SCHEDULES, interleaved[:1])}
    return [{"schedule": name, "virtual_stages": size} for name, sizes in stages_of.items() for size in sizes]


def shardings(space: SearchedSpace, dp: int, tp: int, cp: int, pp: int) -> list[dict[str, Any]]:
    """Return the ways to share model state among data-parallel ranks, as values of a strategy.

    They are replicas, ZeRO's stages and fully_shard's modes, over all data-parallel ranks or over those of a node with
    replicas, with what each can keep on the host. Shards of several nodes may have secondary ones within each. Other
    stacks have a part of them: flat units are sharded by one wrapper in all modes, the others replicate weights beside
    sharded optimizer state.
    """
    if dp * cp == 1:
        return [{}]
    memory, is_own = space.stack.memory, space.stack.memory.kind == "harness"
    divides = is_own and tp > 1  # matrices, which DistributedDataParallel leaves whole
    wrapper = "fsdp" if divides or memory.kind == "flat_units" else "ddp"
    keeps_masters_whole = is_own and space.config.precision.is_mixed  # as ZeroRedundancyOptimizer does
    node_sizes = (space.cluster.gpus_per_node // tp, space.cluster.gpus_per_node)
    sizes = {dp, *(size for size in node_sizes if size > 1 and dp % size == 0)}
    shards = [
        {"data_parallel": "fsdp", "zero_stage": stage, "dp_shard": size, "dp_replicate": dp // size}
        for size, stage in itertools.product(sorted(sizes), (2, 3))
        if size * cp > 1 and stage in memory.zero_stages
    ]
    replicates = 0 in memory.zero_stages and (dp > 1 or not divides)
    cuts_optimizer = 1 in memory.zero_stages and dp > 1 and not divides and not keeps_masters_whole
    ways: list[tuple[bool, Iterable[dict[str, Any]]]] = [
        (replicates, [{"data_parallel": wrapper, "dp_replicate": dp}]),
        (cuts_optimizer, [{"data_parallel": "ddp", "zero_stage": 1, "dp_shard": dp}]),
        (is_own and cp == pp == tp == 1, deepspeed_ways(dp, space.offloads)),
        (True, shards),
        (is_own and space.offloads, [way | {"offload": "parameters"} for way in shards if way["zero_stage"] == 3]),
    ]
    possible = [way for is_possible, of_kind in ways if is_possible for way in of_kind]
    parts = space.fixed_values("strategy").get("secondary_shards", space.cluster.gpus_per_node)
    takes_secondary = is_own and cp == pp == tp == 1 < parts and not space.config.model.num_experts
    whole = [way for way in possible if way.get("zero_stage") == 3 and way.get("offload", "none") == "none"]
    divided = [way for way in whole if way["dp_shard"] > parts and way["dp_shard"] % parts == 0]
    return possible + [way | {"secondary_shards": parts} for way in divided if takes_secondary]


def deepspeed_ways(dp: int, offloads: bool) -> Iterator[dict[str, Any]]:
    """Yield DeepSpeed's stages with the settings of the papers, and with those that it recommends for speed."""
    keys = ("engine", "zero_stage", "options", "literature")
    for stage, settings in itertools.product((1, 2, 3), ("", "_tuned")):
        preset = load_strategy_preset(f"zero{stage}{settings}")
        kinds = ("none", "optimizer", "parameters")[: 3 if stage == 3 else 2]
        for kind in kinds if offloads else ("none",):
            yield {key: getattr(preset, key) for key in keys} | {"dp_shard": dp, "offload": kind}


def plan_problems(prediction: Prediction) -> Iterator[str]:
    """Yield every reason why a configuration cannot run as its layout on its cluster, a line each.

    They are those of a run but for what depends on the machine at hand. The rules of an engine are those of the stack
    `harness` alone; another stack has its own.
    """
    config, layout, cluster, stack = prediction.config, prediction.layout, prediction.cluster, prediction.stack
    yield from incompatibilities(config, layout)
    problem = cluster.world_size_problem(layout.world_size)
    if problem:
        yield problem
    yield from described_machine(cluster).world_size_problems(layout.world_size)
    if prediction.has_own_memory:
        yield from unsupported_elsewhere(engine_module(layout.engine), config, layout, described_machine(cluster))
    if stack.name == "harness":
        yield from compiler_incompatibilities(config, layout)
    else:
        yield from stack_problems(config, layout, stack)


def predict(config: RunConfig, layout: Layout, cluster: DescribedCluster, stack: StackConfig) -> Prediction:
    """Return the prediction of a layout with what its engine allocates."""
    return Prediction(config, layout, cluster, stack, engine_module(layout.engine).state_widths)


def offers(prediction: Prediction) -> Iterator[str]:
    """Yield what would make a prediction that does not fit one that does, each as what to type."""
    config, layout, cluster, stack = prediction.config, prediction.layout, prediction.cluster, prediction.stack
    axis = "dp_shard" if layout.dp_shard > 1 or layout.data_parallel != "ddp" else "dp_replicate"

    def plan_variant(changed: RunConfig, world_size: int | None) -> Variant | None:
        """Return the changed configuration as the cluster, or more nodes of it, would run it."""
        ranks = world_size or layout.world_size  # a multiple of the layout's
        wider = dataclasses.replace(layout, **{axis: getattr(layout, axis) * ranks // layout.world_size})
        try:
            other = wider if changed.strategy == config.strategy else resolve_layout(changed.strategy, ranks)
            planned = predict(changed, other, cluster.with_ranks(ranks), stack)
            return None if any(plan_problems(planned)) else Variant(other, planned.memory, planned.room)
        except UserError:
            return None

    choices = Choices(
        plan_variant,
        prediction.memory.process_bytes,
        sharded=(load_strategy_preset("fsdp_full_shard"),),
        precisions=tuple(map(load_precision_preset, ("bf16_mixed", "bf16"))),
        offloads=cluster.device == "cuda",
    )
    yield from remedies(config, layout, choices)
