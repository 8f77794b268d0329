"""The fit of a few physical parameters to measured points. Imports no torch.

Each curve is a sum of terms with coefficients of 0 or more, such as a latency and bytes over a bandwidth. The fit
minimizes the sum of relative deviations, so that short and long points count alike and a disturbed one does not pull
the others with it.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.calibration.points import Measurements, Point
from harness.config.hardware import HardwareConfig
from harness.cost_model.node_groups import RankGroup
from harness.cost_model.timing.collectives import all_reduce_seconds, gather_seconds, send_seconds
from harness.cost_model.timing.kernels import KernelRates, kernel_rates, rank_hardware
from harness.util.text import UserError, format_bytes

ITERATIONS = 30
MOST_OVERLAP_SLOWDOWN = 2.0  # more is not the collective's doing, but another program's
# The least share of the longest message's time that its bytes must take for the points to tell a bandwidth.
BYTES_SHARE = 0.5

RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # around all ranks

ATTENTION_KERNELS = {"forward": 1, "backward": 2}

# What the curves are called, in the order of their table.
CURVES = {
    "product": "matrix products, {dtype}",
    **{curve: f"attention, {curve}" for curve in ATTENTION_KERNELS},
    "memory": "memory",
    "memory in caches": "memory in caches, not fitted",
    **{curve: f"{curve} of {{ranks}} ranks" for curve in RING_PASSES},
    "send": "send of {ranks} ranks, not fitted",
}


def fit_terms(terms: Sequence[Sequence[float]], points: Sequence[Point], fixed: Sequence[float] = ()) -> list[float]:
    """Return a coefficient of at least 0 for each term, by least absolute relative deviations.

    `terms` has a row for each point, `fixed` what is known of each point's seconds beside the terms.
    """
    target = np.array([point.seconds for point in points], dtype=float)
    rest = target - np.array(fixed or np.zeros(len(target)), dtype=float)
    scaled, wanted = np.array(terms, dtype=float) / target[:, None], rest / target
    weights = np.ones(len(target))
    best = np.zeros(scaled.shape[1])
    for _ in range(ITERATIONS):  # iteratively reweighted least squares
        best = _non_negative(scaled * weights[:, None], wanted * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ best - wanted), 1e-3))
    return [float(value) for value in best]


def _non_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least-squares coefficients of at least 0, by trying every set of terms."""
    candidates = []
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        coefficients = np.zeros(matrix.shape[1])
        coefficients[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        if (coefficients >= 0).all():
            candidates.append(coefficients)
    return min(candidates, key=lambda coefficients: float(np.linalg.norm(matrix @ coefficients - wanted)))


@dataclass(frozen=True, kw_only=True)
class FittedRates(KernelRates):
    """The rates of one rank, all ranks of its node computing at once, and of the links between them."""

    peak_flops: float  # the best matrix product's
    peak_memory_bandwidth: float  # the best kernel's
    launch_seconds: float
    link_bandwidth: float | None  # None with a single rank
    link_latency: float | None
    overlap_slowdown: float | None
    host_bandwidth: float | None = None  # None where nothing is copied to a host


def fit_rates(measured: Measurements) -> FittedRates:
    """Return the rates that reproduce the points best. Raises UserError if messages were too short for a bandwidth.

    What a kernel on memory takes to start is fitted beside its bytes per second. Tensors of small models lie in caches
    and are read faster. A GPU's product is fitted without its bytes, which plans add: in a calibration they are moved
    meanwhile.
    """
    products, memories = measured.of("product"), measured.of("memory")
    _, per_byte = fit_terms([(1.0, p.work) for p in memories], memories)
    memory_bytes = _rate(per_byte, memories)
    moved = [measured.width * (m * k + k * n + m * n) / memory_bytes for m, n, k in (p.sizes for p in products)]
    kernel_seconds, per_flop = fit_terms([(1.0, p.work) for p in products], products, moved)
    attention = []
    for curve, kernels in ATTENTION_KERNELS.items():
        points = measured.of(curve)
        (per_operation,) = fit_terms([(p.work,) for p in points], points, [kernels * kernel_seconds] * len(points))
        attention.append(_rate(per_operation, points))
    bandwidth, latency = fit_links(measured) if measured.of(*RING_PASSES) else (None, None)
    slowdown = measured.overlap_slowdown
    return FittedRates(
        peak_flops=max(p.rate for p in products),
        matmul_flops=_rate(per_flop, products),
        kernel_seconds=kernel_seconds,
        attention_flops=attention[0],
        attention_backward_flops=attention[1],
        peak_memory_bandwidth=max(p.rate for p in memories),
        memory_bytes=memory_bytes,
        launch_seconds=statistics.median(p.seconds / p.work for p in measured.of("launch")),
        link_bandwidth=bandwidth,
        link_latency=latency,
        overlap_slowdown=None if slowdown is None else min(MOST_OVERLAP_SLOWDOWN, max(0.0, slowdown)),
        host_bandwidth=max((p.rate for p in measured.of("to_host")), default=None),
    )


def _rate(per_unit: float, points: Sequence[Point]) -> float:
    """Return the rate of so many seconds a unit; that of the best point where the points tell none."""
    return 1 / per_unit if per_unit > 0 else max(p.rate for p in points)


def fit_links(measured: Measurements) -> tuple[float, float]:
    """Return the bytes per second of a ring between the ranks, and the seconds of one of its steps.

    Single transfers are left out: a backend may send faster than its collectives do, of which steps have more. Raises
    UserError if bytes are less than BYTES_SHARE of the longest message's time: then the points tell a latency alone,
    and the bandwidth would be a guess.
    """
    points = measured.of(*RING_PASSES)
    rings = [(RING_PASSES[p.curve], p.sizes[0], p.work) for p in points]
    # A ring's steps and the bytes that a rank sends, as harness.cost_model.timing.collectives has them.
    terms = [(passes * (ranks - 1.0), passes * (ranks - 1) / ranks * size) for passes, ranks, size in rings]
    latency, per_byte = fit_terms(terms, points)
    steps, moved = max(terms, key=lambda term: term[1])
    if per_byte * moved < BYTES_SHARE * (per_byte * moved + latency * steps):
        raise UserError(
            f"harness calibrate cannot fit a bandwidth, as messages of {max(p.work for p in points):.0f} bytes take"
            " latency alone: leave out --quick"
        )
    return 1 / per_byte, latency


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
    return [_curve_error(curve, measured, hardware) for curve in CURVES if measured.of(curve)]


def _curve_error(curve: str, measured: Measurements, hardware: HardwareConfig) -> CurveError:
    """Return the errors of predicted seconds, beside the best rate that was measured."""
    points = sorted(measured.of(curve), key=lambda point: point.work)
    ends, unit = (points[0], points[-1]), "FLOP/s"
    if curve == "product":
        sizes = " to ".join(f"{m} x {k} x {n}" for m, n, k in (point.sizes for point in ends))
    elif curve in ATTENTION_KERNELS:
        lengths = [point.sizes[2] for point in points]
        sizes = f"{min(lengths)} to {max(lengths)} tokens"
    else:
        sizes, unit = " to ".join(format_bytes(point.work) for point in ends), "B/s"
    ranks = " and ".join(map(str, sorted({size for point in points for size in point.sizes[:1]})))
    name, best = CURVES[curve].format(dtype=measured.dtype, ranks=ranks), max(point.rate for point in points)
    errors = [abs(predicted_seconds(p, measured, hardware) / p.seconds - 1) for p in points]
    return CurveError(name, len(points), sizes, f"{best:.3g} {unit}", statistics.median(errors), max(errors))


def predicted_seconds(point: Point, measured: Measurements, hardware: HardwareConfig) -> float:
    """Return what the planner says of a kernel with as many ranks on the machine, or of a collective in one node."""
    rates = kernel_rates(rank_hardware(hardware, measured.ranks), measured.dtype)
    match point.curve:
        case "product":
            m, n, k = point.sizes
            return rates.product_seconds(m, n, k, measured.width)
        case "forward" | "backward" as curve:
            rate = rates.attention_flops if curve == "forward" else rates.attention_backward_flops
            return point.work / rate + ATTENTION_KERNELS[curve] * rates.kernel_seconds
        case "memory" | "memory in caches":
            return point.work / rates.memory_bytes
        case "send":
            return send_seconds(point.work, 1, point.sizes[0], hardware)
    seconds = all_reduce_seconds if point.curve == "all_reduce" else gather_seconds
    return seconds(point.work, RankGroup(point.sizes[0], 1), hardware)
