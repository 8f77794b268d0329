"""The measurements of the links between this machine's devices: collectives by message size, beside kernels and alone.

Messages grow until their bytes, and not the latency, decide the time.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from harness.calibration.points import Collective, CollectivePoint, OverlapPoint
from harness.calibration.stopwatch import Stopwatch

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
