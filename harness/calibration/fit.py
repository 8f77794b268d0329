"""The fit of a few physical parameters to measured points. Imports no torch.

Each curve is a sum of terms with coefficients of 0 or more, such as a latency and bytes over a bandwidth. The fit
minimizes the sum of relative deviations, so that short and long points count alike and a disturbed one does not pull
the others with it.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.calibration.points import (
    AttentionPoint,
    CollectivePoint,
    Measurements,
    OverlapPoint,
)
from harness.config.byte_size import format_bytes
from harness.config.hardware import HardwareConfig
from harness.cost_model.timing.collectives import RankGroup, all_reduce_seconds, gather_seconds, send_seconds
from harness.cost_model.timing.kernels import KernelRates, kernel_rates, rank_hardware
from harness.util.errors import UserError

ITERATIONS = 30
MOST_OVERLAP_SLOWDOWN = 2.0  # more is not the collective's doing, but another program's
# The least share of the longest message's time that its bytes must take for the points to tell a bandwidth.
BYTES_SHARE = 0.5


def fit_terms(terms: Sequence[Sequence[float]], seconds: Sequence[float], fixed: Sequence[float] = ()) -> list[float]:
    """Return a coefficient of at least 0 for each term, by least absolute relative deviations.

    `terms` has a row for each point, `fixed` what is known of each point's seconds beside the terms.
    """
    target = np.array(seconds, dtype=float)
    rest = target - np.array(fixed or np.zeros(len(target)), dtype=float)
    scaled, wanted = np.array(terms, dtype=float) / target[:, None], rest / target
    weights = np.ones(len(target))
    best = np.zeros(scaled.shape[1])
    for _ in range(ITERATIONS):  # iteratively reweighted least squares
        best = _non_negative(scaled * weights[:, None], wanted * weights)
        deviations = np.abs(scaled @ best - wanted)
        weights = 1 / np.sqrt(np.maximum(deviations, 1e-3))
    return [float(value) for value in best]


def _non_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least-squares coefficients of at least 0, by trying every set of terms."""
    columns = range(matrix.shape[1])
    best, lowest = np.zeros(matrix.shape[1]), float(wanted @ wanted)
    for number in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(columns, number):
            part = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            if (part < 0).any():
                continue
            deviation = matrix[:, chosen] @ part - wanted
            if deviation @ deviation < lowest - 1e-15:
                lowest, best = float(deviation @ deviation), np.zeros(matrix.shape[1])
                best[list(chosen)] = part
    return best


@dataclass(frozen=True)
class FittedRates:
    """The rates of one rank, all ranks of its node computing at once, and of the links between them."""

    peak_flops: float  # the best matrix product's
    matmul_flops: float  # that of an endlessly large product
    kernel_seconds: float
    attention_flops: float
    attention_backward_flops: float
    peak_memory_bandwidth: float  # the best kernel's
    memory_bandwidth: float
    launch_seconds: float
    link_bandwidth: float | None  # None with a single rank
    link_latency: float | None
    overlap_slowdown: float | None
    host_bandwidth: float | None = None  # None where nothing is copied to a host


def fit_rates(measured: Measurements) -> FittedRates:
    """Return the rates that reproduce the points best. Raises UserError if messages were too short for a bandwidth."""
    memory_bandwidth = _memory_bandwidth(measured)
    matmul_flops, kernel_seconds = _matmul(measured, memory_bandwidth)
    forward, backward = _attention(measured, kernel_seconds)
    bandwidth, latency = fit_links(measured) if measured.collectives else (None, None)
    return FittedRates(
        peak_flops=max(point.operations / point.seconds for point in measured.matmuls),
        matmul_flops=matmul_flops,
        kernel_seconds=kernel_seconds,
        attention_flops=forward,
        attention_backward_flops=backward,
        peak_memory_bandwidth=max(p.bytes_moved / p.seconds for p in measured.memories if not p.in_cache),
        memory_bandwidth=memory_bandwidth,
        launch_seconds=statistics.median(point.seconds / point.kernels for point in measured.launches),
        link_bandwidth=bandwidth,
        link_latency=latency,
        overlap_slowdown=_overlap_slowdown(measured.overlaps),
        host_bandwidth=max((p.bytes_moved / p.seconds for p in measured.host_copies), default=None),
    )


def _memory_bandwidth(measured: Measurements) -> float:
    """Return bytes per second of kernels that read and write more than caches hold.

    What each takes to start is fitted beside it. Tensors of small models lie in caches and are read faster.
    """
    points = [point for point in measured.memories if not point.in_cache]
    _, per_byte = fit_terms([(1.0, p.bytes_moved) for p in points], [p.seconds for p in points])
    return _inverse(per_byte, max(p.bytes_moved / p.seconds for p in points))


def _matmul(measured: Measurements, memory_bandwidth: float) -> tuple[float, float]:
    """Return the FLOP/s of an endlessly large product, and the seconds of a kernel beside operations and bytes."""
    points, width = measured.matmuls, measured.width
    moved = [width * (p.m * p.k + p.k * p.n + p.m * p.n) / memory_bandwidth for p in points]
    start, per_flop = fit_terms([(1.0, p.operations) for p in points], [p.seconds for p in points], moved)
    return _inverse(per_flop, max(p.operations / p.seconds for p in points)), start


def attention_passes(points: Sequence[AttentionPoint]) -> Iterator[tuple[str, list[float], list[float], int]]:
    """Yield forward and backward of attention: the operations and seconds of every point, and the kernels of each.

    Backward computes 2.5 times as many products.
    """
    yield "forward", [p.operations for p in points], [p.forward_seconds for p in points], 1
    yield "backward", [2.5 * p.operations for p in points], [p.backward_seconds for p in points], 2


def _attention(measured: Measurements, kernel_seconds: float) -> Iterator[float]:
    """Yield the FLOP/s of fused attention in forward and in backward."""
    for _, work, seconds, kernels in attention_passes(measured.attentions):
        (per_flop,) = fit_terms([(flops,) for flops in work], seconds, [kernels * kernel_seconds] * len(work))
        yield _inverse(per_flop, max(w / s for w, s in zip(work, seconds, strict=True)))


def fit_links(measured: Measurements) -> tuple[float, float]:
    """Return the bytes per second of a ring between the ranks, and the seconds of one of its steps.

    Single transfers are left out: a backend may send faster than its collectives do, of which steps have more. Raises
    UserError if bytes are less than BYTES_SHARE of the longest message's time: then the points tell a latency alone,
    and the bandwidth would be a guess.
    """
    points = [point for point in measured.collectives if point.operation != "send"]
    terms = [link_terms(p.operation, p.ranks, p.total_bytes) for p in points]
    latency, per_byte = fit_terms(terms, [p.seconds for p in points])
    steps, moved = terms[max(range(len(points)), key=lambda index: terms[index][1])]
    if per_byte * moved < BYTES_SHARE * (per_byte * moved + latency * steps):
        longest = max(p.total_bytes for p in points)
        raise UserError(
            f"harness calibrate cannot tell a bandwidth from messages of at most {longest} bytes, whose time is"
            " latency for the most part: measure longer ones, without --quick"
        )
    return 1 / per_byte, latency


def link_terms(operation: str, ranks: int, total_bytes: int) -> tuple[float, float]:
    """Return a ring's steps and the bytes that a rank sends, as harness.cost_model.timing.collectives has them."""
    if operation == "send":
        return 1.0, float(total_bytes)
    passes = 2 if operation == "all_reduce" else 1
    return passes * (ranks - 1.0), passes * (ranks - 1) / ranks * total_bytes


def _overlap_slowdown(points: Sequence[OverlapPoint]) -> float | None:
    """Return the share of a collective's time by which it slows down the kernels beside it."""
    if not points:
        return None
    shares = [(p.both_seconds - p.kernel_seconds) / p.collective_seconds for p in points]
    return min(MOST_OVERLAP_SLOWDOWN, max(0.0, statistics.median(shares)))


def _inverse(per_unit: float, otherwise: float) -> float:
    """Return the rate of so many seconds a unit; `otherwise` where the points tell none."""
    return 1 / per_unit if per_unit > 0 else otherwise


@dataclass(frozen=True)
class CurveError:
    """How well one curve reproduces the points that it was fitted to."""

    name: str
    points: int
    sizes: str  # from the smallest to the largest
    best: str  # the best rate among the points
    median_error: float  # of |predicted / measured - 1|
    largest_error: float


def curve_errors(measured: Measurements, hardware: HardwareConfig) -> list[CurveError]:
    """Return the errors of every curve, with as many ranks on the machine as measured."""
    rates = kernel_rates(rank_hardware(hardware, measured.ranks), measured.dtype)
    return [*_kernel_errors(measured, rates), *_transfer_errors(measured, rates, hardware)]


def _kernel_errors(measured: Measurements, rates: KernelRates) -> Iterator[CurveError]:
    """Yield the errors of what computes."""
    products, width = sorted(measured.matmuls, key=lambda point: point.operations), measured.width
    sizes = " to ".join(f"{p.m} x {p.k} x {p.n}" for p in (products[0], products[-1]))
    predicted = [rates.product_seconds(p.m, p.n, p.k, width) for p in products]
    operations, seconds = [p.operations for p in products], [p.seconds for p in products]
    yield _curve(f"matrix products, {measured.dtype}", sizes, "FLOP/s", operations, predicted, seconds)
    lengths = [p.seq_len for p in measured.attentions]
    sizes = f"{min(lengths)} to {max(lengths)} tokens"
    both_rates = (rates.attention_flops, rates.attention_backward_flops)
    for (name, work, seconds, kernels), rate in zip(attention_passes(measured.attentions), both_rates, strict=True):
        predicted = [flops / rate + kernels * rates.kernel_seconds for flops in work]
        yield _curve(f"attention, {name}", sizes, "FLOP/s", work, predicted, seconds)


def _transfer_errors(measured: Measurements, rates: KernelRates, hardware: HardwareConfig) -> Iterator[CurveError]:
    """Yield the errors of what moves bytes in a device or between ranks."""
    curves: dict[str, list[tuple[int, float, float]]] = defaultdict(list)  # bytes, predicted and measured seconds
    for memory in sorted(measured.memories, key=lambda point: point.in_cache):
        name = "memory in caches, not fitted" if memory.in_cache else "memory"
        seconds = rates.elementwise_seconds(memory.bytes_moved)
        curves[name].append((memory.bytes_moved, seconds, memory.seconds))
    for operation in dict.fromkeys(point.operation for point in measured.collectives):
        own = [point for point in measured.collectives if point.operation == operation]
        ranks = " and ".join(map(str, sorted({point.ranks for point in own})))
        name = f"{operation} of {ranks} ranks" + (", not fitted" if operation == "send" else "")
        curves[name] = [(point.total_bytes, collective_seconds(point, hardware), point.seconds) for point in own]
    for name, points in curves.items():
        moved, predicted, measured_seconds = zip(*points, strict=True)
        sizes = f"{format_bytes(min(moved))} to {format_bytes(max(moved))}"
        yield _curve(name, sizes, "B/s", moved, predicted, measured_seconds)


def _curve(
    name: str, sizes: str, unit: str, amounts: Sequence[float], predicted: Sequence[float], measured: Sequence[float]
) -> CurveError:
    """Return the errors of predicted seconds, beside the best rate that was measured."""
    errors = [abs(own / seconds - 1) for own, seconds in zip(predicted, measured, strict=True)]
    best = max(amount / seconds for amount, seconds in zip(amounts, measured, strict=True))
    return CurveError(name, len(errors), sizes, f"{best:.3g} {unit}", statistics.median(errors), max(errors))


def collective_seconds(point: CollectivePoint, hardware: HardwareConfig) -> float:
    """Return what the planner says of a collective in one node."""
    group = RankGroup(point.ranks, 1)
    if point.operation == "send":
        return send_seconds(point.total_bytes, 1, point.ranks, hardware)
    seconds = all_reduce_seconds if point.operation == "all_reduce" else gather_seconds
    return seconds(point.total_bytes, group, hardware)
