"""The proof that every rank holds the parameters, gradients and optimizer state of its layout, and nothing more."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.cost_model.deepspeed_zero import rank_partitions
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import (
    fsdp_rows,
    is_expert_weight,
    is_layer_matrix,
    local_numel,
    split_into_stages,
    stages_of_rank,
    tp_shard_dim,
)
from harness.layout.state_widths import STATE_KINDS, StateKind, StateWidths
from harness.records.rank_report import Box, RankReport, StateShard
from harness.tensors.shard import GATHERED

MASTER_BYTES = 4  # per parameter element, in fp32


def ownership_problems(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield every difference between the shards that the ranks hold and those of the layout; none if it is proven.

    All elements of every parameter must be there, on as many ranks as the layout has copies, in equal shares and on
    the right pipeline stage.
    """
    if len(ranks) != layout.world_size:
        yield f"{len(ranks)} ranks wrote a report, and the layout has {layout.world_size} ranks"
        return
    for kind in STATE_KINDS:
        by_rank = [kept_shards(rank, kind) for rank in ranks]
        yield from problems_of_state(kind, layout, partial(_ownership_problems, kind, by_rank, config, layout))


def problems_of_state(kind: StateKind, layout: Layout, problems_of: Callable[[int], Iterator[str]]) -> list[str]:
    """Return the problems of a kind of state that is divided into data-parallel shards, whose number they depend on.

    Stage 1 has gradients whole until they are reduced, and then this rank's shard of the result: none may be a problem.
    """
    is_reduced_late = kind == "gradients" and layout.zero_stage == 1
    counts = {layout.shard_count(kind), layout.dp_shard if is_reduced_late else layout.shard_count(kind)}
    by_count = [list(problems_of(count)) for count in sorted(counts)]
    return [] if [] in by_count else by_count[0]


def kept_shards(rank: RankReport, kind: StateKind) -> list[StateShard]:
    """Return the shards of a kind of state that a rank keeps, without gathered copies."""
    return [shard for shard in reported_shards(rank, kind) if shard.state_name != GATHERED]


def gathered_problems(ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield a problem if a rank keeps whole parameters beside its shards, which is not the papers' method."""
    if any(shard.state_name == GATHERED for rank in ranks for shard in reported_shards(rank, "parameters")):
        yield "parameters are still whole between steps, although the layout shards them"


def gradient_problems(
    model: ModelConfig, layout: Layout, widths: StateWidths, ranks: Sequence[RankReport]
) -> Iterator[str]:
    """Yield which ranks of ZeRO stage 2 or 3 had more gradients than their share and a few single ones in transit.

    DeepSpeed's stage 2 keeps the gradients of all parameters that lie in a rank's partition, at least in part, whole.
    """
    if layout.zero_stage < 2 or layout.shard_count("gradients") == 1:
        return
    largest = largest_parameter_numel(model)
    for rank in ranks:
        share = rank_numel(model, layout, rank.rank, "gradients")
        if layout.uses_deepspeed_zero and layout.zero_stage == 2:
            partitions = rank_partitions(model, layout, stages_of_rank(model, layout, rank.rank))
            share = max(share, *(partition.owned for partition in partitions))
        width = widths.gradients + widths.host_gradients
        allowed = 1.05 * width * share + 3 * width * largest
        peak = rank.profiled.gradient_bytes
        if peak > allowed:
            yield (
                f"gradients: rank {rank.rank} held {peak} bytes, and its share in strategy.zero_stage="
                f"{layout.zero_stage} is {width * share:.0f} bytes"
            )


def placement_problems(layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where model state is not on the device that strategy.offload names.

    The engine's own statement is checked and, where the device is not the host, every shard.
    """
    for rank in ranks:
        if sorted(rank.host_state) != sorted(layout.offloaded_state):
            offloaded = ", ".join(rank.host_state) or "nothing"
            yield (f"rank {rank.rank} was built to keep {offloaded} on the host, and strategy.offload={layout.offload}")
        for kind, bytes_by_device in rank.state_bytes_by_device.items() if rank.device_name != "cpu" else ():
            expected = "cpu" if kind in layout.offloaded_state else "cuda"
            for device, size in bytes_by_device.items():
                if device != expected and size:
                    yield (
                        f"{kind}: rank {rank.rank} holds {size} bytes on {device}, and strategy.offload="
                        f"{layout.offload} places them on {expected}"
                    )


def build_peak_problems(
    config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[RankReport]
) -> Iterator[str]:
    """Yield which ranks of a pipeline built more than their own stages.

    Three copies of the largest parameter are allowed beside them, because parameters are built one at a time.
    """
    if not layout.pp_enabled:
        return
    largest_bytes = largest_parameter_numel(config.model) * MASTER_BYTES
    width = widths.parameters + widths.masters
    if layout.data_parallel == "ddp":
        width += widths.gathered  # DistributedDataParallel's buckets
    for rank in ranks:
        share = width * rank_numel(config.model, layout, rank.rank, "parameters")
        peak = rank.start_peak_bytes
        if peak is not None and peak > share + 3 * largest_bytes:
            yield f"rank {rank.rank} held {peak} bytes while it was built, and its stages take {share:.0f} bytes"


def rank_shares(model: ModelConfig, layout: Layout, rank: int, shards: int, kind: StateKind) -> dict[str, float]:
    """Return the elements of each parameter's state that a rank holds if data-parallel ranks divide it so often.

    Frozen parameters have no state but themselves.
    """
    stages = (
        local_numel(model, layout, stage, trained=kind != "parameters") for stage in stages_of_rank(model, layout, rank)
    )
    return {
        name: elements / (layout.expert_shards(shards) if is_expert_weight(name) else shards)
        for stage in stages
        for name, elements in stage.items()
    }


def rank_numel(model: ModelConfig, layout: Layout, rank: int, kind: StateKind) -> float:
    """Return the elements of one kind of state that the layout gives to a rank."""
    return sum(rank_shares(model, layout, rank, layout.shard_count(kind), kind).values())


def largest_parameter_numel(model: ModelConfig) -> int:
    """Return the number of elements of the model's largest parameter."""
    return max(map(math.prod, model_profile(model).parameter_shapes.values()))


def reported_shards(rank: RankReport, kind: str) -> Sequence[StateShard]:
    """Return the shards of a kind of state that a rank reports; of gradients, the first ones."""
    if kind == "gradients":
        return [StateShard(gradient.name, "", gradient.shape, gradient.box, "") for gradient in rank.first_gradients]
    return rank.parameter_shards if kind == "parameters" else rank.optimizer_shards


def _ownership_problems(
    kind: StateKind, by_rank: Sequence[list[StateShard]], config: RunConfig, layout: Layout, shards: int
) -> Iterator[str]:
    """Yield parameters whose elements are not all there, or are on more or fewer ranks than the layout has copies."""
    model, shapes = config.model, model_profile(config.model).parameter_shapes
    stages = Counter(name for stage in split_into_stages(model, layout) for name in local_numel(model, layout, stage))
    owners: dict[tuple[str, str], dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, owned in enumerate(by_rank):
        for shard in owned:
            if box_numel(shard.box):
                owners[shard.name, shard.state_name][shard.box].append(rank)
    state_names = {state_name for _, state_name in owners} or {""}
    has_state = {name: kind == "parameters" or model.adapter.trains(name) for name in shapes}
    expected = {
        (name, state) for name in shapes for state in state_names if has_state[name] and is_kept(config, name, state)
    }
    for name, state_name in sorted(expected | owners.keys()):
        label = f"{kind} of {name}" + (f" ({state_name})" if state_name else "")
        boxes = owners[name, state_name]
        is_cut = tp_shard_dim(name, model, layout.vocabulary_parallel) is not None
        divided = layout.expert_shards(shards) * layout.ep if is_expert_weight(name) else shards
        copies = stages[name] * layout.world_size // (divided * layout.pp * (layout.tp if is_cut else 1))
        counts = {len(ranks) for ranks in boxes.values()}
        if name not in shapes:
            yield f"{label}: ranks have shards of it, but the model has no such parameter"
        elif not has_state[name]:
            yield f"{label}: ranks have shards of it, but adapter={config.model.adapter.name} freezes this parameter"
        elif sum(map(box_numel, boxes)) != math.prod(shapes[name]) or _overlap(boxes):
            yield f"{label}: the ranks' shards do not add up to its {math.prod(shapes[name])} elements"
        elif (name, state_name) not in expected:
            yield f"{label}: optimizer={config.optimizer.name} has no such state of it"
        elif counts != {copies}:
            owner_counts = " or ".join(map(str, sorted(counts)))
            yield f"{label}: {owner_counts} of {len(by_rank)} ranks hold them, and the layout has {copies} copies"
    for rank, owned in enumerate(by_rank):
        yield from excess_problems(kind, owned, model, layout, rank, shards)


def is_kept(config: RunConfig, name: str, state_name: str) -> bool:
    """Return whether a parameter has a state of this name, if that is one of the optimizer's."""
    profile = model_profile(config.model)
    is_matrix = is_layer_matrix(profile.layer_index(name), profile.parameter_shapes.get(name, ()))
    return config.optimizer.spec.keeps(state_name, is_matrix)


def excess_problems(
    kind: StateKind, owned: Sequence[StateShard], model: ModelConfig, layout: Layout, rank: int, shards: int
) -> Iterator[str]:
    """Yield a line for parameters of other stages on a rank, and for states larger than the rank's equal share."""
    shares = rank_shares(model, layout, rank, shards, kind)
    total = math.ceil(sum(shares.values()))
    shapes = model_profile(model).parameter_shapes
    by_rows = sum(shard_numel(name, shapes[name], model, layout, shards) for name in shares)
    has_whole_parameters = kind == "optimizer" and layout.partitions_by_parameter
    spare = max(math.prod(shapes[name]) for name in shares) if has_whole_parameters else shards
    for shard in owned:
        if box_numel(shard.box) and shard.name not in shares:
            yield f"{kind} of {shard.name}: rank {rank} holds them, and its pipeline stage does not have this parameter"
    for label, elements in elements_by_state(kind, owned).items():
        if elements > max(by_rows, total + spare):
            yield f"{label}: rank {rank} holds {elements} elements, and its equal share is {total}"


def elements_by_state(kind: str, owned: Iterable[StateShard]) -> Counter[str]:
    """Return how many elements shards have together, by the kind and the name of the state as a text names them."""
    numel: Counter[str] = Counter()
    for shard in owned:
        numel[f"{kind} ({shard.state_name})" if shard.state_name else kind] += box_numel(shard.box)
    return numel


def shard_numel(
    name: str, shape: Sequence[int], model: ModelConfig, layout: Layout, shards: int, index: int = 0, place: int = 0
) -> int:
    """Return the elements of a parameter's shard of this index; shards are equal runs of rows, the last ones shorter.

    Tensor parallelism divides rows in the same way, or another dimension, first, and expert parallelism the experts;
    `place` is that of the rank in its tensor-parallel group. The first shard of the first rank is the largest.
    """
    own = list(shape)
    if is_expert_weight(name):
        own[0], shards = own[0] // layout.ep, layout.expert_shards(shards)
    dimension = tp_shard_dim(name, model, layout.vocabulary_parallel)
    if dimension == 0:
        part = math.ceil(own[0] / layout.tp)
        own[0] = min(part, max(0, own[0] - place * part))
    elif dimension is not None:
        own[dimension] //= layout.tp
    if 0 in own:
        return 0
    rows, row = fsdp_rows(own, shards)
    chunk = math.ceil(rows / shards)
    return min(chunk, max(0, rows - index * chunk)) * row


def box_numel(box: Iterable[Sequence[int]]) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def _overlap(boxes: Iterable[Box]) -> bool:
    """Return whether two of a tensor's boxes share an element; of sorted intervals only neighbors are compared."""
    ordered = sorted(boxes)
    pairs = pairwise(ordered) if ordered and len(ordered[0]) == 1 else combinations(ordered, 2)
    return any(all(a[0] < b[1] and b[0] < a[1] for a, b in zip(left, right, strict=True)) for left, right in pairs)
