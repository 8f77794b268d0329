"""Whether a run trained the same thing: its losses and gradients against those of a single process."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from harness.layout.layout import Layout
from harness.records.schema import Box, Rank

SAME = 1e-6  # relative; what the same operations on the same numbers may differ by

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative, of one operation


@dataclass(frozen=True)
class Deviation:
    """The largest relative differences from the reference, and what differs most."""

    loss: float
    loss_where: str
    gradient: float
    gradient_where: str


def deviation(reference: Rank, ranks: Sequence[Rank], compute: str) -> Deviation:
    """Compares every step's loss and gradient norm, and every parameter's gradient at the first and last step.

    Copies of a gradient are compared one by one, never averaged: averaging would hide ranks that never synchronised.
    At the first step all start from the same weights. At the last these differ by what was rounded on the way in the
    width of `compute`, and a gradient far below the others (of queries and keys that attend evenly) by more than it is.
    """
    losses = [
        (_relative(_mean(rank["losses"][step] for rank in ranks), expected), f"step {step}")
        for step, expected in enumerate(reference["losses"])
    ]
    gradients = [
        (_relative(norm, expected), f"global norm at step {step}, rank {rank['rank']}")
        for rank in ranks
        for step, (norm, expected) in enumerate(zip(_norms(rank), _norms(reference), strict=True))
    ]
    for moment, rounding in (("first_gradients", 0.0), ("first_moments", 0.0), ("last_gradients", ROUNDING[compute])):
        gradients += _gradient_deviations(moment, reference, ranks, rounding)
    loss, loss_where = max(losses)
    gradient, gradient_where = max(gradients)
    return Deviation(loss, loss_where, gradient, gradient_where)


def cross_rank_mismatches(layout: Layout, ranks: Sequence[Rank]) -> list[str]:
    """Where ranks differ in what must be one: the norm, the loss of the same data, copies of trained parameters."""
    said: dict[tuple[str, str], list[list[float | None]]] = defaultdict(list)
    for rank in ranks:
        said["the global gradient norm", ""].append(_norms(rank))
        said["the loss of the same data", str(layout.data_rank(rank["rank"]))].append(rank["losses"])
        for kind in ("parameter", "master"):
            for name, _, box, square, product in rank[f"last_{kind}s"]:
                said[f"the {kind} of {name}", str(box)].append([square, product])
    return [
        f"{what} is not the same on all ranks that have it"
        for (what, _), lists in said.items()
        if any(_relative(a, b) > SAME for other in lists[1:] for a, b in zip(lists[0], other, strict=True))
    ]


def overflow_problems(reference: Rank, ranks: Sequence[Rank]) -> list[str]:
    """Whether other steps were left out than in the reference: sums that are cut otherwise overflow later."""
    found, expected = ranks[0]["skipped_steps"], reference["skipped_steps"]
    if found == expected:
        return []
    return [
        f"{found} steps were left out because gradients overflowed, {expected} of the single process: choose a smaller"
        " precision.initial_loss_scale to compare them"
    ]


def dropout_rng_problems(layout: Layout, ranks: Sequence[Rank]) -> list[str]:
    """Whether dropout's masks are one where ranks share what is dropped, and differ where they do not."""
    alone = ("pp", "dp_replicate", "dp_shard", "cp", *(["tp"] if layout.sequence_parallel else []))
    by_seed: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    by_place: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for rank in ranks:
        place = tuple(layout.coordinates(rank["rank"])[axis] for axis in alone)
        by_seed[rank["masks_seed"]].add(place)
        by_place[place].add(rank["masks_seed"])
    problems = []
    if any(len(seeds) > 1 for seeds in by_place.values()):
        problems.append("dropout: ranks that share what they drop drew their masks from different seeds")
    if any(len(places) > 1 for places in by_seed.values()):
        problems.append("dropout: ranks with data, layers or parts of their own drew the same masks")
    shares_sequence = layout.tp > 1 and not layout.sequence_parallel
    for rank in ranks:
        own = [layout.coordinates(rank["rank"])["tp"]] if shares_sequence else [None]
        if rank["masks_ranks"] != own:
            problems.append(f"dropout: heads of rank {rank['rank']} drew masks as of {rank['masks_ranks']}, not {own}")
    return problems


def deviation_problems(found: Deviation, limits: Mapping[str, float]) -> list[str]:
    """Which of loss and gradient is above its limit, or not a number at all."""
    found_of = {"loss": (found.loss, found.loss_where), "gradient": (found.gradient, found.gradient_where)}
    return [
        f"{what} deviates by {found_of[what][0]:.2e} ({found_of[what][1]}), above the bound of {limit:g}"
        for what, limit in limits.items()
        if not found_of[what][0] <= limit
    ]


def _gradient_deviations(
    moment: str, reference: Rank, ranks: Sequence[Rank], rounding: float
) -> Iterator[tuple[float, str]]:
    """Relative to the reference's norm of the parameter, of a bias to that of weight and bias together.

    A bias's gradient may be rounding alone: the softmax of attention knows no shift, so a key's bias has none. For the
    same reason a norm counts as no smaller than `rounding` of one of that many elements of the average size.
    """
    whole = {name: (math.sqrt(square), product) for name, _, _, square, product in reference[moment]}
    elements = {name: math.prod(stop - start for start, stop in box) for name, _, box, _, _ in reference[moment]}
    average = math.hypot(*(norm for norm, _ in whole.values())) / math.sqrt(sum(elements.values()))
    for name, copies in _copies(moment, ranks).items():
        if name not in whole:
            yield math.inf, f"{name} is not in the reference"
            continue
        norm, product = whole[name]
        module, _, what = name.rpartition(".")
        beside = whole.get(f"{module}.weight", (0.0, 0.0))[0] if what == "bias" else 0.0
        least = rounding * average * math.sqrt(elements[name])
        scale = max(math.hypot(norm, beside), least) or 1.0
        for square_sum, product_sum in copies:
            of = f"{name}'s {moment.replace('_', ' ')}"
            yield _guarded(abs(math.sqrt(square_sum) - norm) / scale), f"norm of {of}"
            yield _guarded(abs(product_sum - product) / scale), f"direction of {of}"
    for name in whole.keys() - {entry[0] for rank in ranks for entry in rank[moment]}:
        yield math.inf, f"{name} has no gradient"


def _copies(moment: str, ranks: Sequence[Rank]) -> dict[str, list[tuple[float, float]]]:
    """By parameter, (sum of squares, projection) of each whole copy of its gradient that the ranks hold together."""
    by_box: dict[str, dict[Box, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for name, _, box, square, product in rank[moment]:
            finite = (math.nan if square is None else square, math.nan if product is None else product)
            if all(start < stop for start, stop in box):  # an empty box may be on several ranks
                by_box[name][tuple(map(tuple, box))].append(finite)
    return {name: _put_together(list(boxes.values())) for name, boxes in by_box.items()}


def _put_together(boxes: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Whole copies, of every box one each; what one box has oftener than another is part of none, and not a number."""
    missing = (math.nan, math.nan)
    whole = zip_longest(*boxes, fillvalue=missing)
    return [(math.fsum(square for square, _ in copy), math.fsum(product for _, product in copy)) for copy in whole]


def _norms(rank: Rank) -> list[float | None]:
    """Of the gradient at every step; 0 where it overflowed and the step was left out."""
    return [0.0 if norm is None and rank["skipped_steps"] else norm for norm in rank["grad_norms"]]


def _mean(values: Iterable[float | None]) -> float:
    """Not a number if one is none."""
    each = [math.nan if value is None else value for value in values]
    return sum(each) / len(each) if each else math.nan


def _relative(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:  # how JSON keeps what is not finite
        return math.inf
    return _guarded(abs(value - expected) / abs(expected) if expected else abs(value))


def _guarded(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
