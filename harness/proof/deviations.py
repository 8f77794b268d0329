"""The differences between two trainings: of losses, global norms, and every parameter's gradients and first update."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from harness.records.rank_report import Box, TensorFingerprint, TrainingReport

# The relative error of one operation. With scaled matrices it is that of the 16-bit sums between their products: what
# their casts do is in the measured floors.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-8}

MOMENTS = ("first_gradients", "first_moments", "first_updates", "last_gradients")

ROUTER = ".gate.weight"  # the end of its parameter's name

LAYER_NUMBER = re.compile(r"\b\d+\.")

Measure = Literal["loss", "global norm", "norm", "direction"]


class Aspect(NamedTuple):
    """An aspect of a training that two trainings are compared in; differences of one aspect are equally large.

    The norm of a tensor changes far less than its direction. Vectors differ more than matrices: the gradient of a
    norm's weight is a sum over all tokens, which some kernels round at every summand, and a key's bias has a gradient
    of nothing but rounding errors. A router's matrix is as one of them: a token whose two best experts are as good as
    each other goes to either, and the gradient is the difference that this makes.
    """

    measure: Measure
    moment: str  # the field of the fingerprints, "step", or "gradients" for those of any step
    step: int = 0  # of a loss, a global norm, or a gradient of any step
    of_vectors: bool = False  # norm weights and biases, which have one dimension, and routers
    kind: str = ""  # of a gradient of any step: the parameter's name without the number of its layer


class Difference(NamedTuple):
    """The relative difference of one value, and where it is."""

    aspect: Aspect
    value: float
    where: str


def differences(reference: TrainingReport, ranks: Sequence[TrainingReport], compute: str) -> Iterator[Difference]:
    """Yield the difference of every value that the ranks report from the reference's.

    Copies of a gradient are compared one by one: averages would hide that ranks never synchronized. `compute` is the
    dtype of the compute. A moment that the reference does not report, as in older records, is left out, and so are the
    steps that only the ranks trained.
    """
    for step, expected in enumerate(reference.losses):
        loss = _mean(rank.losses[step] for rank in ranks)
        yield Difference(Aspect("loss", "step", step), relative_difference(loss, expected), f"step {step}")
    for number, rank in enumerate(ranks):
        for step, (expected, norm) in enumerate(zip(grad_norms(reference), grad_norms(rank), strict=False)):
            where = f"global norm at step {step}, rank {number}"
            yield Difference(Aspect("global norm", "step", step), relative_difference(norm, expected), where)
    for moment in MOMENTS:
        of_ranks = [_fingerprints(moment, rank) for rank in ranks]
        yield from _tensor_differences(moment, 0, _fingerprints(moment, reference), of_ranks, ROUNDING[compute])
    steps = min(len(report.gradient_squares) for report in (reference, *ranks))
    for step in (step for step in range(steps) if reference.grad_norms[step] is not None):  # not skipped
        of_ranks = [gradients_at(step, rank) for rank in ranks]
        yield from _tensor_differences("gradients", step, gradients_at(step, reference), of_ranks, ROUNDING[compute])


def gradients_at(step: int, rank: TrainingReport) -> list[TensorFingerprint]:
    """Return the gradients of any step, of which a rank knows the norms alone."""
    squares = zip(rank.first_gradients, rank.gradient_squares[step], strict=False)  # a missing one has no norm
    return [entry._replace(square=square, projection=0.0) for entry, square in squares]


def _tensor_differences(
    moment: str,
    step: int,
    entries: Sequence[TensorFingerprint],
    of_ranks: Sequence[Sequence[TensorFingerprint]],
    rounding: float,
) -> Iterator[Difference]:
    """Yield the differences of every parameter's norm and direction at a moment, if the reference has `entries` of it.

    They are relative to the reference's norm of the parameter, for a bias to the norm of weight and bias together,
    because softmax does not change with a shift of keys. For the same reason a later gradient counts as no smaller than
    `rounding` of one with as many elements of the average size: weights differ by then, and the gradient of queries and
    keys with uniform attention may differ by more than its own size.
    """
    if not entries:
        return
    whole = {name: (math.sqrt(_or_nan(square)), _or_nan(projection)) for name, _, _, square, projection in entries}
    elements = {name: math.prod(stop - start for start, stop in box) for name, _, box, _, _ in entries}
    vectors = {entry.name for entry in entries if len(entry.shape) == 1 or entry.name.endswith(ROUTER)}
    average = math.hypot(*(norm for norm, _ in whole.values())) / math.sqrt(sum(elements.values()))
    least = rounding * average if moment in ("last_gradients", "gradients") else 0.0
    what = f"gradient at step {step}" if moment == "gradients" else moment.replace("_", " ")
    for name, copies in copies_of_tensors(of_ranks).items():
        if name not in whole:
            yield Difference(Aspect("norm", moment, step), math.inf, f"{name} is not in the reference")
            continue
        norm, projection = whole[name]
        is_bias = name.endswith(".bias")
        kind = LAYER_NUMBER.sub("", name) if moment == "gradients" else ""
        norm_aspect = Aspect("norm", moment, step, name in vectors, kind)
        weight_norm = whole.get(f"{name.removesuffix('.bias')}.weight", (0.0, 0.0))[0] if is_bias else 0.0
        scale = max(math.hypot(norm, weight_norm), least * math.sqrt(elements[name])) or 1.0
        for square_sum, projection_sum in copies:
            difference = _nan_to_inf(abs(math.sqrt(square_sum) - norm) / scale)
            yield Difference(norm_aspect, difference, f"norm of {name}'s {what}")
            if moment == "gradients":
                continue
            difference = _nan_to_inf(abs(projection_sum - projection) / scale)
            yield Difference(norm_aspect._replace(measure="direction"), difference, f"direction of {name}'s {what}")
    for name in whole.keys() - {entry.name for of_rank in of_ranks for entry in of_rank}:
        yield Difference(Aspect("norm", moment, step), math.inf, f"{name} has no {what}")


def copies_of_tensors(of_ranks: Sequence[Sequence[TensorFingerprint]]) -> dict[str, list[tuple[float, float]]]:
    """Return by parameter the (sum of squares, projection) of each whole copy that the ranks hold together."""
    by_box: dict[str, dict[Box, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for entries in of_ranks:
        for name, _, box, square, projection in entries:
            if all(start < stop for start, stop in box):  # an empty box may be on several ranks
                by_box[name][box].append((_or_nan(square), _or_nan(projection)))
    return {name: _combine_shards(list(boxes.values())) for name, boxes in by_box.items()}


def _combine_shards(boxes: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return whole copies, each made of one shard per box. A copy with a missing shard is NaN."""
    missing = (math.nan, math.nan)
    whole = zip_longest(*boxes, fillvalue=missing)
    return [(math.fsum(square for square, _ in copy), math.fsum(value for _, value in copy)) for copy in whole]


def grad_norms(rank: TrainingReport) -> list[float | None]:
    """Return the gradient norm at every step; 0 where it overflowed and the step was skipped."""
    return [0.0 if norm is None and rank.skipped_steps else norm for norm in rank.grad_norms]


def relative_difference(value: float | None, expected: float | None) -> float:
    """Return the relative difference, absolute from zero; infinite where a value was not finite, which files omit."""
    if value is None or expected is None:
        return math.inf
    return _nan_to_inf(abs(value - expected) / abs(expected) if expected else abs(value))


def _fingerprints(moment: str, rank: TrainingReport) -> Sequence[TensorFingerprint]:
    fingerprints: Sequence[TensorFingerprint] = getattr(rank, moment)
    return fingerprints


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean; NaN if a value is None."""
    numbers = [_or_nan(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _nan_to_inf(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
