"""The measurements of one device: matrix products, attention, memory, and the host that launches kernels."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness.calibration.points import (
    AttentionPoint,
    Collective,
    CollectivePoint,
    LaunchPoint,
    MatmulPoint,
    MemoryPoint,
    OverlapPoint,
)
from harness.config.schema import Device


@dataclass(frozen=True)
class Stopwatch:
    """A clock for one device and a time for each point."""

    device: torch.device
    budget_seconds: float  # for the samples of one point

    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float, group: dist.ProcessGroup | None = None) -> float:
        """Return the most seconds of any rank; all ranks wait for each other."""
        most = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return float(most)

    def sample(self, operation: Callable[[], object], calls: int, waits: bool) -> float:
        """Return the seconds of one call; with `waits` the device's, otherwise those in which the host launches it."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            operation()
        if waits:
            self.synchronize()
        seconds = time.perf_counter() - start
        self.synchronize()
        return seconds / calls

    def median_seconds(
        self, operation: Callable[[], object], group: dist.ProcessGroup | None = None, waits: bool = True
    ) -> float:
        """Return the median seconds of an operation, which all ranks of the group call together.

        The first two calls do not count: they allocate, and connect the ranks of a group.
        """
        for _ in range(2):
            operation()
        once = self.slowest(self.sample(operation, 1, waits), group)
        calls = min(MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / max(once, 1e-9))))
        number = int(self.budget_seconds / (calls * max(once, 1e-9)))
        samples = []
        for _ in range(min(MOST_SAMPLES, max(FEWEST_SAMPLES, number))):
            self.slowest(0.0, group)  # all ranks begin together
            samples.append(self.sample(operation, calls, waits))
        return self.slowest(statistics.median(samples), group)


CHAIN = 8  # times that the chain of operators is repeated
CHAIN_KERNELS = 5  # of one repetition: a product, a sum and SiLU in forward, a product and SiLU's gradient in backward


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured on one kind of device."""

    sides: tuple[int, ...]  # of matrices
    attentions: tuple[tuple[int, int, int, int], ...]  # batch, heads, seq_len, head_dim
    memory_bytes: tuple[int, ...]  # of one tensor
    cache_bytes: int  # that caches may hold


SIZES: dict[Device, Sizes] = {
    "cpu": Sizes(
        (96, 192, 384, 768, 1024),
        ((1, 4, 128, 24), (1, 6, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 64)),
        tuple(2**power for power in range(16, 27, 2)),
        2**24,
    ),
    "cuda": Sizes(
        (512, 1024, 2048, 4096, 8192),
        ((1, 16, 1024, 64), (1, 16, 2048, 128), (1, 32, 4096, 128), (1, 32, 8192, 128)),
        tuple(2**power for power in range(20, 31, 2)),
        2**27,
    ),
}

QUICK_SIZES: dict[Device, Sizes] = {
    "cpu": Sizes((96, 256, 512), ((1, 4, 128, 24), (1, 6, 256, 64)), (2**18, 2**24, 2**25), 2**24),
    "cuda": Sizes((512, 2048, 4096), ((1, 16, 1024, 64), (1, 16, 2048, 128)), (2**22, 2**27, 2**29), 2**27),
}


def matmul_points(watch: Stopwatch, sides: tuple[int, ...], dtype: torch.dtype) -> Iterator[MatmulPoint]:
    """Yield the products of square matrices, and of those of an MLP that is four times as wide."""
    for side in sides:
        for m, n, k in ((side, side, side), (side, 4 * side, side)):
            left = torch.randn(m, k, device=watch.device, dtype=dtype)
            right = torch.randn(k, n, device=watch.device, dtype=dtype)
            out = torch.empty(m, n, device=watch.device, dtype=dtype)
            yield MatmulPoint(m, n, k, watch.median_seconds(lambda: torch.mm(left, right, out=out)))  # noqa: B023


def attention_points(
    watch: Stopwatch, shapes: tuple[tuple[int, int, int, int], ...], dtype: torch.dtype
) -> Iterator[AttentionPoint]:
    """Yield forward and backward of causal attention."""
    for shape in shapes:
        tensors = tuple(torch.randn(shape, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(3))

        def forward() -> torch.Tensor:
            query, key, value = tensors  # noqa: B023
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        output = forward()
        gradient = torch.randn_like(output)

        def backward() -> object:
            return torch.autograd.grad(output, tensors, gradient, retain_graph=True)  # noqa: B023

        yield AttentionPoint(*shape, watch.median_seconds(forward), watch.median_seconds(backward))


def memory_points(watch: Stopwatch, sizes: tuple[int, ...], cache_bytes: int) -> Iterator[MemoryPoint]:
    """Yield copies and sums of fp32 tensors of so many bytes."""
    for size in sizes:
        left, right, out = torch.ones(3, size // 4, device=watch.device)
        cached = size < cache_bytes
        yield MemoryPoint("copy", cached, 2 * size, watch.median_seconds(lambda: out.copy_(left)))  # noqa: B023
        yield MemoryPoint("add", cached, 3 * size, watch.median_seconds(lambda: torch.add(left, right, out=out)))  # noqa: B023


def host_copy_points(watch: Stopwatch, sizes: tuple[int, ...]) -> Iterator[MemoryPoint]:
    """Yield copies of so many bytes to pinned memory of the host, all devices at once."""
    for size in sizes:
        source = torch.ones(size, dtype=torch.uint8, device=watch.device)
        target = torch.ones(size, dtype=torch.uint8).pin_memory()
        copy = watch.median_seconds(lambda: target.copy_(source, non_blocking=True))  # noqa: B023
        yield MemoryPoint("to_host", False, size, copy)


def launch_points(watch: Stopwatch) -> Iterator[LaunchPoint]:
    """Yield a chain of operators so small that only the host's time counts, with autograd as training has it."""
    start = torch.ones(8, 8, device=watch.device, requires_grad=True)
    other = torch.ones(8, 8, device=watch.device)

    def chain() -> None:
        hidden = start
        for _ in range(CHAIN):
            hidden = F.silu(hidden * other + other)
        torch.autograd.grad(hidden, start, other)

    yield LaunchPoint(CHAIN * CHAIN_KERNELS, watch.median_seconds(chain, waits=False))


SAMPLE_SECONDS = 0.002  # at least so long, so that the clock and the barrier before it do not count
FEWEST_SAMPLES, MOST_SAMPLES = 5, 50
MOST_CALLS = 1000  # of one sample


SMALLEST_BYTES, GROWTH = 2**12, 4
BANDWIDTH_GROWTH = 0.75 * GROWTH  # of the time of a message that is GROWTH times as long, where bytes decide it
LONG_MESSAGES = 3  # measured where bytes decide the time
ALWAYS_BYTES = 2**22  # messages up to these are measured even if shorter ones, disturbed perhaps, took long
MOST_BYTES = 2**30
OVERLAP_BYTES = 2**22
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")


def group_sizes(ranks: int) -> list[int]:
    """Return the sizes of groups that are measured: powers of two, and all ranks."""
    powers = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    return [*powers, ranks] if ranks > 1 else []


def collective_points(watch: Stopwatch, ranks: int, most_seconds: float) -> Iterator[CollectivePoint]:
    """Yield every collective at growing sizes until a message takes longer than `most_seconds`.

    Groups are the first ranks of the machine; the others wait, and yield the same operations with no seconds of theirs.
    """
    for size in group_sizes(ranks):
        group = dist.new_group(list(range(size)))
        for operation in COLLECTIVES if size == ranks else COLLECTIVES[:3]:
            if dist.get_rank() < size:
                yield from _growing_messages(watch, operation, size, group, most_seconds)
        dist.barrier()


def _growing_messages(
    watch: Stopwatch, operation: Collective, ranks: int, group: dist.ProcessGroup, most_seconds: float
) -> Iterator[CollectivePoint]:
    """Yield one collective at growing sizes. All ranks see the same seconds, and so stop at the same size."""
    total_bytes, long_messages, previous = SMALLEST_BYTES, 0, 0.0
    while total_bytes <= ALWAYS_BYTES or (
        total_bytes <= MOST_BYTES and long_messages < LONG_MESSAGES and previous < most_seconds
    ):
        seconds = watch.median_seconds(message(operation, total_bytes, ranks, group, watch.device), group)
        yield CollectivePoint(operation, ranks, total_bytes, seconds)
        long_messages += bool(previous) and seconds >= BANDWIDTH_GROWTH * previous
        total_bytes, previous = total_bytes * GROWTH, seconds


def message(
    operation: Collective, total_bytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """Return a call of a collective on fp32 tensors that all ranks of the group have together, or of a whole transfer.

    A transfer goes from the first rank to the second and back, of half as many bytes each way.
    """
    elements = total_bytes // 4 // ranks * ranks
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    half = whole[: elements // 2]

    def there_and_back() -> None:
        rank = dist.get_rank()
        if rank == 0:
            dist.send(half, 1, group=group)
            dist.recv(half, 1, group=group)
        elif rank == 1:
            dist.recv(half, 0, group=group)
            dist.send(half, 0, group=group)

    return there_and_back


def overlap_points(watch: Stopwatch, side: int, dtype: torch.dtype) -> Iterator[OverlapPoint]:
    """Yield matrix products that take about twice as long as an all-reduce, with and without it beside them."""
    left, right = torch.randn(2, side, side, device=watch.device, dtype=dtype)
    gradients = torch.ones(OVERLAP_BYTES // 4, device=watch.device)
    collective = watch.median_seconds(lambda: dist.all_reduce(gradients))
    once = watch.median_seconds(lambda: left @ right)
    number = max(1, round(2 * collective / once))

    def products() -> None:
        for _ in range(number):
            left @ right

    def both() -> None:
        work = dist.all_reduce(gradients, async_op=True)
        products()
        assert work is not None
        work.wait()

    yield OverlapPoint(watch.median_seconds(products), collective, watch.median_seconds(both))
