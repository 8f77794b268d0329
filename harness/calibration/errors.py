"""The errors of a calibrated cluster: every point beside what the planner's own formulas say of it. No torch."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.calibration.points import AttentionPoint, CollectivePoint, MatmulPoint, Measurements, MemoryPoint
from harness.config.byte_size import format_bytes
from harness.config.hardware import HardwareConfig
from harness.cost_model.timing.collectives import Group, all_reduce_seconds, gather_seconds, send_seconds
from harness.cost_model.timing.kernels import KernelRates, fused_attention_flops, kernel_rates, rank_hardware


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
    group = Group(point.ranks, 1)
    if point.operation == "send":
        return send_seconds(point.total_bytes, 1, point.ranks, hardware)
    seconds = all_reduce_seconds if point.operation == "all_reduce" else gather_seconds
    return seconds(point.total_bytes, group, hardware)
