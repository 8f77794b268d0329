"""The fit of a few physical parameters to measured points. Imports no torch.

Each curve is a sum of terms with coefficients of 0 or more, such as a latency and bytes over a bandwidth. The fit
minimizes the sum of relative deviations, so that short and long points count alike and a disturbed one does not pull
the others with it.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.calibration.points import (
    AttentionPoint,
    CollectivePoint,
    MatmulPoint,
    Measurements,
    MemoryPoint,
    OverlapPoint,
)
from harness.config.byte_size import format_bytes
from harness.config.hardware import HardwareConfig
from harness.cost_model.timing.collectives import RankGroup, all_reduce_seconds, gather_seconds, send_seconds
from harness.cost_model.timing.kernels import KernelRates, fused_attention_flops, kernel_rates, rank_hardware
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
        peak_flops=max(2 * p.m * p.n * p.k / p.seconds for p in measured.matmuls),
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
    terms = [(1.0, 2 * p.m * p.n * p.k) for p in points]
    moved = [width * (p.m * p.k + p.k * p.n + p.m * p.n) / memory_bandwidth for p in points]
    start, per_flop = fit_terms(terms, [p.seconds for p in points], moved)
    return _inverse(per_flop, max(2 * p.m * p.n * p.k / p.seconds for p in points)), start


def _attention(measured: Measurements, kernel_seconds: float) -> tuple[float, float]:
    """Return the FLOP/s of fused attention in forward and in backward, which computes 2.5 times as many products."""
    points = measured.attentions
    work = [fused_attention_flops(p.batch * p.seq_len, p.seq_len, p.heads, p.head_dim, 0.5) for p in points]
    rates = []
    for factor, kernels, seconds in (
        (1.0, 1, [p.forward_seconds for p in points]),
        (2.5, 2, [p.backward_seconds for p in points]),
    ):
        fixed = [kernels * kernel_seconds] * len(points)
        (per_flop,) = fit_terms([(factor * flops,) for flops in work], seconds, fixed)
        rates.append(_inverse(per_flop, max(factor * w / s for w, s in zip(work, seconds, strict=True))))
    return rates[0], rates[1]


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
    curves = [_matmuls(measured, rates), *_attentions(measured, rates), *_memories(measured.memories, rates)]
    return [*curves, *_collectives(measured.collectives, hardware)]


def _curve(name: str, sizes: str, best: str, pairs: Sequence[tuple[float, float]]) -> CurveError:
    """Return the errors of (predicted, measured) seconds."""
    errors = [abs(predicted / seconds - 1) for predicted, seconds in pairs]
    return CurveError(name, len(pairs), sizes, best, statistics.median(errors), max(errors))


def _matmuls(measured: Measurements, rates: KernelRates) -> CurveError:
    points = sorted(measured.matmuls, key=_operations)
    pairs = [(rates.product_seconds(p.m, p.n, p.k, measured.width), p.seconds) for p in points]
    first, last = points[0], points[-1]
    sizes = f"{first.m} x {first.k} x {first.n} to {last.m} x {last.k} x {last.n}"
    best = max(_operations(p) / p.seconds for p in points)
    return _curve(f"matrix products, {measured.dtype}", sizes, f"{best:.3g} FLOP/s", pairs)


def _operations(point: MatmulPoint) -> float:
    return 2.0 * point.m * point.n * point.k


def _attentions(measured: Measurements, rates: KernelRates) -> Iterator[CurveError]:
    points = measured.attentions
    work = [fused_attention_flops(p.batch * p.seq_len, p.seq_len, p.heads, p.head_dim, 0.5) for p in points]
    sizes = f"{min(p.seq_len for p in points)} to {max(p.seq_len for p in points)} tokens"
    passes: tuple[tuple[str, float, float, int, Callable[[AttentionPoint], float]], ...] = (
        ("attention, forward", 1.0, rates.attention_flops, 1, lambda point: point.forward_seconds),
        ("attention, backward", 2.5, rates.attention_backward_flops, 2, lambda point: point.backward_seconds),
    )
    for name, factor, rate, kernels, seconds_of in passes:
        seconds = [seconds_of(point) for point in points]
        pairs = [(factor * w / rate + kernels * rates.kernel_seconds, s) for w, s in zip(work, seconds, strict=True)]
        best = max(factor * w / s for w, s in zip(work, seconds, strict=True))
        yield _curve(name, sizes, f"{best:.3g} FLOP/s", pairs)


def _memories(points: Sequence[MemoryPoint], rates: KernelRates) -> Iterator[CurveError]:
    for name, in_cache in (("memory", False), ("memory in caches, not fitted", True)):
        own = [point for point in points if point.in_cache == in_cache]
        if own:
            pairs = [(rates.elementwise_seconds(p.bytes_moved), p.seconds) for p in own]
            sizes = [p.bytes_moved for p in own]
            best = max(p.bytes_moved / p.seconds for p in own)
            text = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
            yield _curve(name, text, f"{best:.3g} B/s", pairs)


def _collectives(points: Sequence[CollectivePoint], hardware: HardwareConfig) -> Iterator[CurveError]:
    for operation in dict.fromkeys(point.operation for point in points):
        own = [point for point in points if point.operation == operation]
        pairs = [(collective_seconds(point, hardware), point.seconds) for point in own]
        sizes = [point.total_bytes for point in own]
        best = max(point.total_bytes / point.seconds for point in own)
        text = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
        ranks = " and ".join(map(str, sorted({point.ranks for point in own})))
        name = f"{operation} of {ranks} ranks" + (", not fitted" if operation == "send" else "")
        yield _curve(name, text, f"{best:.3g} B/s", pairs)


def collective_seconds(point: CollectivePoint, hardware: HardwareConfig) -> float:
    """Return what the planner says of a collective in one node."""
    group = RankGroup(point.ranks, 1)
    if point.operation == "send":
        return send_seconds(point.total_bytes, 1, point.ranks, hardware)
    seconds = all_reduce_seconds if point.operation == "all_reduce" else gather_seconds
    return seconds(point.total_bytes, group, hardware)
