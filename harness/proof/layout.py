"""Whether every rank holds what the layout says of parameters, gradients and optimizer state, and nothing more."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from harness.config.schema import ModelConfig, PrecisionConfig
from harness.cost_model.activations import WIDTH_BYTES
from harness.layout.layout import Layout
from harness.layout.parameters import parameter_shapes
from harness.layout.partition import local_numel, stages_of_rank, tp_shard_dim_under, tp_shards
from harness.layout.state_widths import STATE_KINDS, StateWidths
from harness.records.schema import Box, Rank
from harness.tensors.shard import GATHERED

MASTER_BYTES, MOMENTS_BYTES = 4, 8  # an element in fp32


class OwnedShard(NamedTuple):
    """One piece a rank holds: `box` is the (start, stop) along each dimension of the whole `shape`."""

    name: str
    slot: str
    shape: tuple[int, ...]
    box: Box


def layout_problems(model: ModelConfig, layout: Layout, ranks: Sequence[Rank], literature: bool = True) -> list[str]:
    """Every way in which what the ranks hold is not what the layout says; empty when it is proven.

    Of every parameter all elements must be there, each on exactly the ranks of the layout's copies, in equal shares
    and on the right pipeline stage. Copies gathered on top are allowed where not the literature's method is claimed.
    """
    if len(ranks) != layout.world_size:
        return [f"{len(ranks)} ranks reported, the layout has {layout.world_size}"]
    problems = []
    for kind in STATE_KINDS:
        by_rank = [list(_held(rank, kind)) for rank in ranks]
        allowed = {layout.shard_count(kind)}
        if kind == "gradients" and layout.zero_stage == 1:
            allowed.add(layout.dp_shard)  # whole until they are reduced, then this rank's shard of the result
        if kind == "parameters" and literature and any(h.slot == GATHERED for held in by_rank for h in held):
            problems.append("parameters are still whole between steps, the layout shards them")
        by_rank = [[h for h in held if h.slot != GATHERED] for held in by_rank]
        found = [list(_holding_problems(kind, by_rank, model, layout, shards)) for shards in sorted(allowed)]
        problems += [] if [] in found else found[0]
    return problems


def width_problems(widths: StateWidths, precision: PrecisionConfig, ranks: Sequence[Rank]) -> list[str]:
    """Whether parameters, masters and both moments are there, and as wide as the precision says in this engine; and
    whether gradients are summed over micro-batches as wide as it says.
    """
    moments = {"exp_avg", "exp_avg_sq"}
    has_masters = widths.optimizer > 2 * WIDTH_BYTES[precision.master]  # beside both moments
    parameter = precision.compute if widths.parameters < MASTER_BYTES else precision.master
    expected = {
        "parameters": {("", parameter), (GATHERED, parameter)},
        "optimizer": {(slot, precision.master) for slot in moments | ({"master"} if has_masters else set())},
    }
    problems = []
    for kind, allowed in expected.items():
        found = {(slot, dtype) for rank in ranks for _, slot, _, _, dtype in rank[kind]}
        needed = {pair for pair in allowed if pair[0] != GATHERED}
        for slot, dtype in sorted((found - allowed) | (needed - found)):
            state = "held, not part of" if (slot, dtype) in found else "not held, part of"
            problems.append(f"{kind}: {slot or 'values'} in {dtype} are {state} precision={precision.name} here")
    summed = {dtype for rank in ranks for dtype in rank["profiled"]["gradient_dtypes"]}
    for dtype in sorted(summed - {precision.accumulate}):
        problems.append(f"gradients: summed in {dtype}, by precision={precision.name} in {precision.accumulate}")
    return problems


def gradient_problems(model: ModelConfig, layout: Layout, widths: StateWidths, ranks: Sequence[Rank]) -> list[str]:
    """Whether stages 2 and 3 ever held whole gradients: a share, and a few single ones on their way are allowed."""
    if layout.zero_stage < 2 or layout.shard_count("gradients") == 1:
        return []
    largest = max(math.prod(shape) for shape in parameter_shapes(model).values())
    problems = []
    for rank in ranks:
        share = sum(rank_shares(model, layout, rank["rank"], layout.shard_count("gradients")).values())
        width = widths.gradients + widths.host_gradients
        allowed = 1.05 * width * share + 3 * width * largest
        most = rank["profiled"]["gradient_bytes"]
        if most > allowed:
            problems.append(
                f"gradients: rank {rank['rank']} held {most} bytes, its share in zero_stage={layout.zero_stage} is"
                f" {width * share:.0f}"
            )
    return problems


def placement_problems(layout: Layout, ranks: Sequence[Rank]) -> list[str]:
    """Whether model state lies where strategy.offload says: as what was built says of itself and, where the device is
    not the host, piece by piece.
    """
    problems = []
    for rank in ranks:
        if sorted(rank["on_host"]) != sorted(layout.offloaded_state):
            kept = ", ".join(rank["on_host"]) or "nothing"
            problems.append(
                f"rank {rank['rank']} was built to keep {kept} on the host, strategy.offload={layout.offload}"
            )
        for kind, bytes_by_device in rank["placed"].items() if rank["device_name"] != "cpu" else ():
            place = "cpu" if kind in layout.offloaded_state else "cuda"
            for device, size in bytes_by_device.items():
                if device != place and size:
                    problems.append(
                        f"{kind}: rank {rank['rank']} holds {size} bytes on {device}, strategy.offload={layout.offload}"
                        f" says {place}"
                    )
    return problems


def build_peak_problems(model: ModelConfig, layout: Layout, widths: StateWidths, ranks: Sequence[Rank]) -> list[str]:
    """Whether a rank of a pipeline ever built more than its own stages: one whole parameter at a time, thrice."""
    if layout.pp == 1:
        return []
    largest = max(math.prod(shape) for shape in parameter_shapes(model).values()) * MASTER_BYTES
    problems = []
    for rank in ranks:
        width = widths.parameters + max(0, widths.optimizer - MOMENTS_BYTES)  # and masters, where there are some
        if layout.data_parallel == "ddp":
            width += widths.gathered  # DistributedDataParallel's buckets
        share = width * sum(rank_shares(model, layout, rank["rank"], layout.shard_count("parameters")).values())
        peak = rank["start_peak_bytes"]
        if peak is not None and peak > share + 3 * largest:
            problems.append(f"rank {rank['rank']} held {peak} bytes when it was built, its stages are {share:.0f}")
    return problems


def rank_shares(model: ModelConfig, layout: Layout, rank: int, shards: int) -> dict[str, float]:
    """Elements of each parameter that a rank holds when data-parallel ranks divide them into so many shards."""
    held = (local_numel(model, layout, stage) for stage in stages_of_rank(model, layout, rank))
    return {name: elements / shards for found in held for name, elements in found.items()}


def _held(rank: Rank, kind: str) -> Iterator[OwnedShard]:
    if kind == "gradients":
        for name, shape, box, *_ in rank["first_gradients"]:
            yield OwnedShard(name, "", tuple(shape), tuple(map(tuple, box)))
    else:
        for name, slot, shape, box, _ in rank[kind]:
            yield OwnedShard(name, slot, tuple(shape), tuple(map(tuple, box)))


def _holding_problems(
    kind: str, by_rank: Sequence[list[OwnedShard]], model: ModelConfig, layout: Layout, shards: int
) -> Iterator[str]:
    shapes = parameter_shapes(model)
    owners: dict[tuple[str, str], dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, pieces in enumerate(by_rank):
        for held in pieces:
            if box_numel(held.box):
                owners[held.name, held.slot][held.box].append(rank)
    slots = {slot for _, slot in owners} or {""}
    for name, slot in sorted({(name, slot) for name in shapes for slot in slots} | owners.keys()):
        label = f"{kind} of {name}" + (f" ({slot})" if slot else "")
        boxes = owners[name, slot]
        copies = layout.world_size // (shards * layout.pp * tp_shards(name, model, layout))
        counts = {len(ranks) for ranks in boxes.values()}
        if name not in shapes:
            yield f"{label}: held, and not part of the model"
        elif sum(map(box_numel, boxes)) != math.prod(shapes[name]) or _overlap(boxes):
            yield f"{label}: the ranks' pieces do not make up its {math.prod(shapes[name])} elements once"
        elif counts != {copies}:
            found = " or ".join(map(str, sorted(counts)))
            yield f"{label}: held by {found} of {len(by_rank)} ranks, the layout says {copies}"
    for rank, pieces in enumerate(by_rank):
        yield from _share_problems(kind, pieces, model, layout, rank, shards)


def _share_problems(
    kind: str, pieces: Sequence[OwnedShard], model: ModelConfig, layout: Layout, rank: int, shards: int
) -> Iterator[str]:
    """Whether a rank holds its own stages' parameters only, and no more of them than its equal share."""
    shares = rank_shares(model, layout, rank, shards)
    total = math.ceil(sum(shares.values()))
    shapes = parameter_shapes(model)
    by_rows = sum(_most_rows(name, shapes[name], model, layout, shards) for name in shares)
    found: Counter[str] = Counter()
    for held in pieces:
        found[held.slot] += box_numel(held.box)
        if box_numel(held.box) and held.name not in shares:
            yield f"{kind} of {held.name}: held by rank {rank}, whose stage of the pipeline does not have it"
    for slot, elements in found.items():
        spare = shards
        if kind == "optimizer" and layout.partitions_by_parameter:
            spare = max(math.prod(shapes[name]) for name in shares)
        if elements > max(by_rows, total + spare):
            yield f"{kind} {slot}: rank {rank} holds {elements} elements, its equal share is {total}"


def _most_rows(name: str, shape: Sequence[int], model: ModelConfig, layout: Layout, shards: int) -> int:
    """Elements of a parameter on the rank that holds most of it: cuts fall between rows, or columns."""
    rows, others = shape[0], math.prod(shape[1:])
    dimension = tp_shard_dim_under(name, model, layout)
    if dimension == 0:
        rows = math.ceil(rows / layout.tp)
    elif dimension == 1:
        others //= layout.tp
    return math.ceil(rows / shards) * others


def box_numel(box: Iterable[Sequence[int]]) -> int:
    return math.prod(stop - start for start, stop in box)


def _overlap(boxes: Iterable[Box]) -> bool:
    """Whether two of a tensor's boxes share an element; of intervals sorted neighbours tell."""
    ordered = sorted(boxes)
    pairs = pairwise(ordered) if ordered and len(ordered[0]) == 1 else combinations(ordered, 2)
    return any(all(a[0] < b[1] and b[0] < a[1] for a, b in zip(left, right, strict=True)) for left, right in pairs)
