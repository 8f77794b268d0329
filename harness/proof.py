"""A run proves itself, from what its ranks wrote down: the layout it ran, the bytes it sent, the training it did."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from harness.config import PrecisionConfig
from harness.engines import GATHERED, KINDS, Widths
from harness.layout import Layout

Rank = dict[str, Any]  # a rank file
Box = tuple[tuple[int, int], ...]

MASTER_BYTES, MOMENTS_BYTES = 4, 8  # an element in fp32
VOLUME_TOLERANCE = 0.05  # for norms, flags and padding beside the papers' volume


class Held(NamedTuple):
    """One piece a rank holds: `box` is the (start, stop) along each dimension of the whole `shape`."""

    name: str
    slot: str
    shape: tuple[int, ...]
    box: Box


def layout_problems(layout: Layout, ranks: Sequence[Rank], parameters: int, literature: bool = True) -> list[str]:
    """Every way in which what the ranks hold is not what the layout says; empty when it is proven.

    All elements together must be the model's `parameters`, each must lie on exactly world / shards ranks, and the
    ranks' shares must be equal. Copies gathered on top are allowed where not the literature's method is claimed.
    """
    if len(ranks) != layout.world_size:
        return [f"{len(ranks)} ranks reported, the layout has {layout.world_size}"]
    problems = []
    for kind in KINDS:
        by_rank = [list(_held(rank, kind)) for rank in ranks]
        allowed = {layout.shards(kind)}
        if kind == "gradients" and layout.zero_stage == 1:
            allowed.add(layout.dp_shard)  # whole until they are reduced, then this rank's shard of the result
        if kind == "parameters" and literature and any(h.slot == GATHERED for held in by_rank for h in held):
            problems.append("parameters are still whole between steps, the layout shards them")
        by_rank = [[h for h in held if h.slot != GATHERED] for held in by_rank]
        found = [list(_holding_problems(kind, by_rank, shards, parameters)) for shards in sorted(allowed)]
        problems += [] if [] in found else found[0]
    return problems


def width_problems(widths: Widths, precision: PrecisionConfig, ranks: Sequence[Rank]) -> list[str]:
    """Whether parameters, masters and both moments are there, and as wide as the precision says in this engine."""
    moments = {"exp_avg", "exp_avg_sq"}
    has_masters = widths.optimizer > MOMENTS_BYTES
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
    return problems


def gradient_problems(layout: Layout, widths: Widths, ranks: Sequence[Rank], parameters: int) -> list[str]:
    """Whether stages 2 and 3 ever held whole gradients: a share, and a few single ones on their way are allowed."""
    if layout.zero_stage < 2 or layout.shards("gradients") == 1:
        return []
    largest = max(math.prod(held.shape) for held in _held(ranks[0], "gradients"))
    share = widths.gradients * parameters / layout.shards("gradients")
    allowed = 1.05 * share + 3 * widths.gradients * largest
    most = max(rank["profiled"]["gradient_bytes"] for rank in ranks)
    if most <= allowed:
        return []
    return [f"gradients: a rank held {most} bytes, its share in zero_stage={layout.zero_stage} is {share:.0f}"]


def checkpointing_problems(layers: int, micro_batches: int, checkpointing: str, ranks: Sequence[Rank]) -> list[str]:
    """Whether every layer's forward ran a second time in every micro-batch, or none did."""
    expected = layers * micro_batches if checkpointing == "full" else 0
    found = {rank["profiled"]["recomputations"] for rank in ranks}
    if found == {expected}:
        return []
    counts = " or ".join(map(str, sorted(found)))
    return [f"checkpointing={checkpointing}: {counts} second forwards of a layer in a step, {expected} expected"]


def _held(rank: Rank, kind: str) -> Iterator[Held]:
    if kind == "gradients":
        for name, shape, box, *_ in rank["first_gradients"]:
            yield Held(name, "", tuple(shape), tuple(map(tuple, box)))
    else:
        for name, slot, shape, box, _ in rank[kind]:
            yield Held(name, slot, tuple(shape), tuple(map(tuple, box)))


def _holding_problems(kind: str, by_rank: Sequence[list[Held]], shards: int, parameters: int) -> Iterator[str]:
    copies = len(by_rank) // shards
    owners: dict[tuple[str, str], dict[Box, int]] = defaultdict(lambda: defaultdict(int))
    sizes: dict[tuple[str, str], int] = {}
    fair_share: dict[str, int] = defaultdict(int)  # uneven rows may give one rank up to a row of each tensor more
    for held in {(h.name, h.slot): h for pieces in by_rank for h in pieces}.values():
        sizes[held.name, held.slot] = math.prod(held.shape)
        rows = held.shape[0] if held.shape else 1
        fair_share[held.slot] += math.ceil(rows / shards) * (math.prod(held.shape) // rows)
    for pieces in by_rank:
        for held in pieces:
            if volume(held.box):
                owners[held.name, held.slot][held.box] += 1
    for (name, slot), size in sizes.items():
        boxes = owners[name, slot]
        label = f"{kind} of {name}" + (f" ({slot})" if slot else "")
        if sum(map(volume, boxes)) != size or _overlap(boxes):
            yield f"{label}: the ranks' pieces do not make up its {size} elements once"
        elif set(boxes.values()) != {copies}:
            counts = " or ".join(map(str, sorted(set(boxes.values()))))
            yield f"{label}: held by {counts} of {len(by_rank)} ranks, the layout says {copies}"
    for slot in {slot for _, slot in sizes} or {""}:
        total = sum(size for (_, s), size in sizes.items() if s == slot)
        if total != parameters:
            yield f"{kind} {slot}: {total} elements held, the model has {parameters}"
        allowed = max(fair_share[slot], math.ceil(parameters / shards) + shards)
        for rank, pieces in enumerate(by_rank):
            share = sum(volume(held.box) for held in pieces if held.slot == slot)
            if share > allowed:
                yield f"{kind} {slot}: rank {rank} holds {share} elements, its equal share is {parameters // shards}"


def volume(box: Iterable[Sequence[int]]) -> int:
    return math.prod(stop - start for start, stop in box)


def _overlap(boxes: Iterable[Box]) -> bool:
    """Whether two of a tensor's boxes share an element; shards are intervals, so sorted neighbours tell."""
    ordered = sorted(boxes)
    return any(
        all(a[0] < b[1] and b[0] < a[1] for a, b in zip(left, right, strict=True)) for left, right in pairwise(ordered)
    )


def volume_problems(sent_bytes: float, expected_bytes: float) -> list[str]:
    """Whether the layout's volume was sent: neither a synchronisation less nor one more."""
    if abs(sent_bytes - expected_bytes) <= VOLUME_TOLERANCE * expected_bytes + _SCALARS:
        return []
    ratio = f"{sent_bytes / expected_bytes:.2f} x" if expected_bytes else "not"
    return [
        f"a rank sent {sent_bytes:.0f} bytes a step, {ratio} the {expected_bytes:.0f} of this layout in the papers"
        " (strategy.literature=false lifts this)"
    ]


_SCALARS = 4096  # bytes of norms and flags, for models so tiny that 5 % is less


@dataclass(frozen=True)
class Deviation:
    """The largest relative differences from the reference, and what differs most."""

    loss: float
    loss_where: str
    gradient: float
    gradient_where: str


def deviation(reference: Rank, ranks: Sequence[Rank]) -> Deviation:
    """Compares every step's loss and gradient norm, and every parameter's gradient at the first and last step.

    Copies of a gradient are compared one by one, never averaged: averaging would hide ranks that never synchronised.
    """
    losses = [
        (_relative(_mean(rank["losses"][step] for rank in ranks), expected), f"step {step}")
        for step, expected in enumerate(reference["losses"])
    ]
    gradients = [
        (_relative(norm, expected), f"global norm at step {step}, rank {rank['rank']}")
        for rank in ranks
        for step, (norm, expected) in enumerate(zip(rank["grad_norms"], reference["grad_norms"], strict=True))
    ]
    for moment in ("first_gradients", "last_gradients"):
        gradients += _gradient_deviations(moment, reference, ranks)
    loss, loss_where = max(losses)
    gradient, gradient_where = max(gradients)
    return Deviation(loss, loss_where, gradient, gradient_where)


def deviation_problems(found: Deviation, limits: Mapping[str, float]) -> list[str]:
    """Which of loss and gradient is above its limit, or not a number at all."""
    found_of = {"loss": (found.loss, found.loss_where), "gradient": (found.gradient, found.gradient_where)}
    return [
        f"{what} deviates by {found_of[what][0]:.2e} ({found_of[what][1]}), above the bound of {limit:g}"
        for what, limit in limits.items()
        if not found_of[what][0] <= limit
    ]


def _gradient_deviations(moment: str, reference: Rank, ranks: Sequence[Rank]) -> Iterator[tuple[float, str]]:
    whole = {name: (math.sqrt(square), product) for name, _, _, square, product in reference[moment]}
    for name, copies in _copies(moment, ranks).items():
        if name not in whole:
            yield math.inf, f"{name} is not in the reference"
            continue
        norm, product = whole[name]
        for square_sum, product_sum in copies:
            yield _relative(math.sqrt(square_sum), norm), f"norm of {name}'s {moment.replace('_', ' ')}"
            difference = abs(product_sum - product)
            yield _guarded(difference / norm if norm else difference), f"direction of {name}'s {moment[:5]} gradient"
    for name in whole.keys() - {entry[0] for rank in ranks for entry in rank[moment]}:
        yield math.inf, f"{name} has no gradient"


def _copies(moment: str, ranks: Sequence[Rank]) -> dict[str, list[tuple[float, float]]]:
    """By parameter, (sum of squares, projection) of each whole copy of its gradient that the ranks hold together."""
    by_box: dict[str, dict[Box, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for name, _, box, square, product in rank[moment]:
            finite = (math.nan if square is None else square, math.nan if product is None else product)
            by_box[name][tuple(map(tuple, box))].append(finite)
    return {
        name: [tuple(map(sum, zip(*copy, strict=True))) for copy in zip(*boxes.values(), strict=False)]  # type: ignore[misc]
        for name, boxes in by_box.items()
    }


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _relative(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:  # how JSON keeps what is not finite
        return math.inf
    return _guarded(abs(value - expected) / abs(expected) if expected else abs(value))


def _guarded(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
