"""The proof that a run trained as a single process does: a comparison of their losses and gradients."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from harness.layout.layout import Layout
from harness.records.rank_report import RankReport
from harness.records.tensor_shards import Box, TensorFingerprint

SAME_TOLERANCE = 1e-6  # relative; the same operations on the same numbers may differ by this

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # the relative error of one operation


@dataclass(frozen=True)
class Deviation:
    """The largest relative differences from the reference, and where they are."""

    loss: float
    loss_where: str
    gradient: float
    gradient_where: str


def compare_training(reference: RankReport, ranks: Sequence[RankReport], compute: str) -> Deviation:
    """Compare every step's loss and gradient norm, and every parameter's gradient at the first and last step.

    Copies of a gradient are compared one by one: averages would hide that ranks never synchronized. At the first step
    all start from the same weights. At the last step the weights differ by the rounding errors of `compute`, and a
    gradient far smaller than the others (that of queries and keys with uniform attention) may differ by more than its
    own size.
    """
    losses = [
        (_relative(_mean(rank.losses[step] for rank in ranks), expected), f"step {step}")
        for step, expected in enumerate(reference.losses)
    ]
    gradients = [
        (_relative(norm, expected), f"global norm at step {step}, rank {rank.rank}")
        for rank in ranks
        for step, (norm, expected) in enumerate(zip(_norms(rank), _norms(reference), strict=True))
    ]
    for moment, rounding in (("first_gradients", 0.0), ("first_moments", 0.0), ("last_gradients", ROUNDING[compute])):
        gradients += _gradient_deviations(moment, reference, ranks, rounding)
    loss, loss_where = max(losses)
    gradient, gradient_where = max(gradients)
    return Deviation(loss, loss_where, gradient, gradient_where)


def cross_rank_mismatches(layout: Layout, ranks: Sequence[RankReport]) -> list[str]:
    """Return what differs between ranks and must not: the norm, the loss of the same data, copies of parameters."""
    values: dict[tuple[str, str], list[Sequence[float | None]]] = defaultdict(list)
    for rank in ranks:
        values["the global gradient norm", ""].append(_norms(rank))
        values["the loss of the same data", str(layout.data_rank(rank.rank))].append(rank.losses)
        for kind, fingerprints in (("parameter", rank.last_parameters), ("master", rank.last_masters)):
            for name, _, box, square, projection in fingerprints:
                values[f"the {kind} of {name}", str(box)].append([square, projection])
    return [
        f"{quantity} is not the same on all ranks that have it"
        for (quantity, _), lists in values.items()
        if any(_relative(a, b) > SAME_TOLERANCE for other in lists[1:] for a, b in zip(lists[0], other, strict=True))
    ]


def overflow_problems(reference: RankReport, ranks: Sequence[RankReport]) -> list[str]:
    """Return a problem if other steps were skipped than in the reference; sums over smaller parts overflow later."""
    skipped, expected = ranks[0].skipped_steps, reference.skipped_steps
    if skipped == expected:
        return []
    return [
        f"{skipped} steps were skipped because gradients overflowed, and {expected} by the single process: choose a"
        " smaller precision.initial_loss_scale to compare them"
    ]


def dropout_rng_problems(layout: Layout, ranks: Sequence[RankReport]) -> list[str]:
    """Return where ranks that share activations drew different dropout masks, and where others drew the same."""
    separate_axes = ("pp", "dp_replicate", "dp_shard", "cp", *(["tp"] if layout.sequence_parallel else []))
    by_seed: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    by_coordinates: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for rank in ranks:
        coordinates = tuple(layout.coordinates(rank.rank)[axis] for axis in separate_axes)
        by_seed[rank.dropout_seed or 0].add(coordinates)
        by_coordinates[coordinates].add(rank.dropout_seed or 0)
    problems = []
    if any(len(seeds) > 1 for seeds in by_coordinates.values()):
        problems.append("dropout: ranks that share activations drew their masks from different seeds")
    if any(len(coordinates) > 1 for coordinates in by_seed.values()):
        problems.append("dropout: ranks with different data, layers or parts of the sequence drew the same masks")
    shares_sequence = layout.tp_enabled and not layout.sequence_parallel
    for rank in ranks:
        expected = [layout.coordinates(rank.rank)["tp"]] if shares_sequence else [None]
        if list(rank.dropout_rng_ranks) != expected:
            problems.append(
                f"dropout: the heads of rank {rank.rank} drew the masks of tensor-parallel ranks"
                f" {list(rank.dropout_rng_ranks)}, and {expected} are expected"
            )
    return problems


def deviation_problems(deviation: Deviation, limits: Mapping[str, float]) -> list[str]:
    """Return which of the deviations of loss and gradient is above its limit, or is not a number."""
    deviations = {
        "loss": (deviation.loss, deviation.loss_where),
        "gradient": (deviation.gradient, deviation.gradient_where),
    }
    return [
        f"{quantity} deviates by {deviations[quantity][0]:.2e} ({deviations[quantity][1]}), above the bound of"
        f" {limit:g}"
        for quantity, limit in limits.items()
        if not deviations[quantity][0] <= limit
    ]


def _gradient_deviations(
    moment: str, reference: RankReport, ranks: Sequence[RankReport], rounding: float
) -> Iterator[tuple[float, str]]:
    """Yield the deviation of every parameter's gradient, and where it is.

    It is relative to the reference's norm of the parameter, for a bias to the norm of weight and bias together: a
    bias's gradient may be nothing but rounding errors, as a key's is, because softmax does not change with a shift. For
    the same reason a norm counts as no smaller than `rounding` of that of as many elements of the average size.
    """
    entries = _fingerprints(moment, reference)
    whole = {name: (math.sqrt(_or_nan(square)), _or_nan(projection)) for name, _, _, square, projection in entries}
    elements = {name: math.prod(stop - start for start, stop in box) for name, _, box, _, _ in entries}
    average = math.hypot(*(norm for norm, _ in whole.values())) / math.sqrt(sum(elements.values()))
    for name, copies in _copies(moment, ranks).items():
        if name not in whole:
            yield math.inf, f"{name} is not in the reference"
            continue
        norm, projection = whole[name]
        module, _, leaf = name.rpartition(".")
        weight_norm = whole.get(f"{module}.weight", (0.0, 0.0))[0] if leaf == "bias" else 0.0
        least = rounding * average * math.sqrt(elements[name])
        scale = max(math.hypot(norm, weight_norm), least) or 1.0
        for square_sum, projection_sum in copies:
            tensor = f"{name}'s {moment.replace('_', ' ')}"
            yield _nan_to_inf(abs(math.sqrt(square_sum) - norm) / scale), f"norm of {tensor}"
            yield _nan_to_inf(abs(projection_sum - projection) / scale), f"direction of {tensor}"
    for name in whole.keys() - {entry.name for rank in ranks for entry in _fingerprints(moment, rank)}:
        yield math.inf, f"{name} has no gradient"


def _fingerprints(moment: str, rank: RankReport) -> Sequence[TensorFingerprint]:
    fingerprints: Sequence[TensorFingerprint] = getattr(rank, moment)
    return fingerprints


def _copies(moment: str, ranks: Sequence[RankReport]) -> dict[str, list[tuple[float, float]]]:
    """Return by parameter the (sum of squares, projection) of each whole copy that the ranks hold together."""
    by_box: dict[str, dict[Box, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for name, _, box, square, projection in _fingerprints(moment, rank):
            if all(start < stop for start, stop in box):  # an empty box may be on several ranks
                by_box[name][box].append((_or_nan(square), _or_nan(projection)))
    return {name: _combine_shards(list(boxes.values())) for name, boxes in by_box.items()}


def _combine_shards(boxes: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return whole copies, each made of one shard per box. A copy with a missing shard is NaN."""
    missing = (math.nan, math.nan)
    whole = zip_longest(*boxes, fillvalue=missing)
    return [(math.fsum(square for square, _ in copy), math.fsum(value for _, value in copy)) for copy in whole]


def _norms(rank: RankReport) -> list[float | None]:
    """Return the gradient norm at every step; 0 where it overflowed and the step was skipped."""
    return [0.0 if norm is None and rank.skipped_steps else norm for norm in rank.grad_norms]


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean; NaN if a value is None."""
    numbers = [_or_nan(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _relative(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:  # a value that was not finite is null in JSON
        return math.inf
    return _nan_to_inf(abs(value - expected) / abs(expected) if expected else abs(value))


def _nan_to_inf(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
