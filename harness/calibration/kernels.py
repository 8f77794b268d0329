"""The measurements of every rank: matrix products, attention, memory, the host that launches kernels, and collectives.

All ranks measure together, and the first one writes what it saw.
"""

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness.calibration.points import RESULT_FILE, SPEC_FILE, Collective, Measurements, Point
from harness.config.schema import Device
from harness.cost_model.timing.kernels import fused_attention_flops
from harness.util.files import atomic_write_json

BACKWARD_WORK = 2.5  # times as many products as attention's forward

CHAIN = 8  # times that the chain of operators is repeated
CHAIN_KERNELS = 5  # of one repetition: a product, a sum and SiLU in forward, a product and SiLU's gradient in backward

SAMPLE_SECONDS = 0.002  # at least so long, so that the clock and the barrier before it do not count
FEWEST_SAMPLES, MOST_SAMPLES = 5, 50
MOST_CALLS = 1000  # of one sample

SMALLEST_BYTES, GROWTH = 2**12, 4
BANDWIDTH_GROWTH = 0.75 * GROWTH  # of the time of a message that is GROWTH times as long, where bytes decide it
LONG_MESSAGES = 3  # measured where bytes decide the time
ALWAYS_BYTES = 2**22  # messages up to these are measured even if shorter ones, disturbed perhaps, took long
MOST_BYTES = 2**30
OVERLAP_BYTES = 2**22


@dataclass(frozen=True)
class Effort:
    """The sizes that are measured on one kind of device, and how long."""

    sides: tuple[int, ...]  # of matrices
    attentions: tuple[tuple[int, int, int, int], ...]  # batch, heads, seq_len, head_dim
    memory_bytes: tuple[int, ...]  # of one tensor
    cache_bytes: int  # that caches may hold
    point_seconds: float = 0.25  # for the samples of a kernel or of a message
    longest_message_seconds: float = 0.1  # no longer message follows


FULL: dict[Device, Effort] = {
    "cpu": Effort(
        (96, 192, 384, 768, 1024),
        ((1, 4, 128, 24), (1, 6, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 64)),
        tuple(2**power for power in range(16, 27, 2)),
        2**24,
    ),
    "cuda": Effort(
        (512, 1024, 2048, 4096, 8192),
        ((1, 16, 1024, 64), (1, 16, 2048, 128), (1, 32, 4096, 128), (1, 32, 8192, 128)),
        tuple(2**power for power in range(20, 31, 2)),
        2**27,
    ),
}

QUICK: dict[Device, Effort] = {
    "cpu": Effort((96, 256, 512), ((1, 4, 128, 24), (1, 6, 256, 64)), (2**18, 2**24, 2**25), 2**24, 0.03, 0.02),
    "cuda": Effort(
        (512, 2048, 4096), ((1, 16, 1024, 64), (1, 16, 2048, 128)), (2**22, 2**27, 2**29), 2**27, 0.03, 0.02
    ),
}


def main(run_dir: str) -> None:
    """Measure as one rank. The file SPEC_FILE in the folder has the device, its dtype and the threads."""
    spec = json.loads((Path(run_dir) / SPEC_FILE).read_text())
    device: Device = spec["device"]
    torch.set_num_threads(spec["threads"])
    torch.set_float32_matmul_precision("highest")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    torch.get_device_module(place).set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    effort = (QUICK if spec["quick"] else FULL)[device]
    dtype, ranks = getattr(torch, spec["dtype"]), dist.get_world_size()
    watch = Stopwatch(place, effort.point_seconds)
    points = (
        *matmul_points(watch, effort.sides, dtype),
        *attention_points(watch, effort.attentions, dtype),
        *memory_points(watch, effort.memory_bytes, effort.cache_bytes),
        launch_point(watch),
        *collective_points(watch, ranks, effort.longest_message_seconds),
        *(host_copy_points(watch, effort.memory_bytes[:4]) if device == "cuda" else ()),
    )
    slowdown = overlap_slowdown(watch, effort.sides[-2], dtype) if ranks > 1 else None
    measurements = Measurements(ranks, spec["dtype"], dtype.itemsize * (device == "cpu"), points, slowdown)
    if dist.get_rank() == 0:
        atomic_write_json(Path(run_dir) / RESULT_FILE, dataclasses.asdict(measurements))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Stopwatch:
    """A clock for one device and a time for each point."""

    device: torch.device
    budget_seconds: float  # for the samples of one point

    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""
        torch.get_device_module(self.device).synchronize()

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


def matmul_points(watch: Stopwatch, sides: tuple[int, ...], dtype: torch.dtype) -> Iterator[Point]:
    """Yield the products of square matrices, and of those of an MLP that is four times as wide."""
    for side in sides:
        for m, n, k in ((side, side, side), (side, 4 * side, side)):
            left, right, out = (
                torch.randn(shape, device=watch.device, dtype=dtype) for shape in ((m, k), (k, n), (m, n))
            )
            seconds = watch.median_seconds(partial(torch.mm, left, right, out=out))
            yield Point("product", (m, n, k), 2.0 * m * n * k, seconds)


def attention_points(
    watch: Stopwatch, shapes: tuple[tuple[int, int, int, int], ...], dtype: torch.dtype
) -> Iterator[Point]:
    """Yield forward and backward of causal attention."""
    for batch, heads, seq_len, head_dim in shapes:
        shape = (batch, heads, seq_len, head_dim)
        q, k, v = (torch.randn(shape, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(3))
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        output = forward()
        backward = partial(torch.autograd.grad, output, (q, k, v), torch.randn_like(output), retain_graph=True)
        work = fused_attention_flops(batch * seq_len, seq_len, heads, head_dim, 0.5)
        yield Point("forward", shape, work, watch.median_seconds(forward))
        yield Point("backward", shape, BACKWARD_WORK * work, watch.median_seconds(backward))


def memory_points(watch: Stopwatch, sizes: tuple[int, ...], cache_bytes: int) -> Iterator[Point]:
    """Yield copies and sums of fp32 tensors of so many bytes."""
    for size in sizes:
        left, right, out = torch.ones(3, size // 4, device=watch.device)
        curve = "memory in caches" if size < cache_bytes else "memory"
        yield Point(curve, (), 2 * size, watch.median_seconds(partial(out.copy_, left)))
        yield Point(curve, (), 3 * size, watch.median_seconds(partial(torch.add, left, right, out=out)))


def host_copy_points(watch: Stopwatch, sizes: tuple[int, ...]) -> Iterator[Point]:
    """Yield copies of so many bytes to pinned memory of the host, all devices at once."""
    for size in sizes:
        source = torch.ones(size, dtype=torch.uint8, device=watch.device)
        target = torch.ones(size, dtype=torch.uint8).pin_memory()
        yield Point("to_host", (), size, watch.median_seconds(partial(target.copy_, source, non_blocking=True)))


def launch_point(watch: Stopwatch) -> Point:
    """Return a chain of operators so small that only the host's time counts, with autograd as training has it."""
    start = torch.ones(8, 8, device=watch.device, requires_grad=True)
    other = torch.ones(8, 8, device=watch.device)

    def chain() -> None:
        hidden = start
        for _ in range(CHAIN):
            hidden = F.silu(hidden * other + other)
        torch.autograd.grad(hidden, start, other)

    return Point("launch", (), CHAIN * CHAIN_KERNELS, watch.median_seconds(chain, waits=False))


def collective_points(watch: Stopwatch, ranks: int, most_seconds: float) -> Iterator[Point]:
    """Yield every collective at growing sizes until a message takes longer than `most_seconds`.

    Groups have powers of two of the machine's first ranks, and all ranks; the other ranks wait, and yield no points.
    """
    powers = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    for size in [*powers, ranks] if ranks > 1 else []:
        group = dist.new_group(list(range(size)))
        for operation in get_args(Collective):
            if dist.get_rank() < size and (operation != "send" or size == ranks):
                yield from _growing_messages(watch, operation, size, group, most_seconds)
        dist.barrier()


def _growing_messages(
    watch: Stopwatch, operation: Collective, ranks: int, group: dist.ProcessGroup, most_seconds: float
) -> Iterator[Point]:
    """Yield one collective at growing sizes. All ranks see the same seconds, and so stop at the same size."""
    total_bytes, long_messages, previous = SMALLEST_BYTES, 0, 0.0
    while total_bytes <= ALWAYS_BYTES or (
        total_bytes <= MOST_BYTES and long_messages < LONG_MESSAGES and previous < most_seconds
    ):
        seconds = watch.median_seconds(message(operation, total_bytes, ranks, group, watch.device), group)
        yield Point(operation, (ranks,), total_bytes, seconds)
        long_messages += bool(previous) and seconds >= BANDWIDTH_GROWTH * previous
        total_bytes, previous = total_bytes * GROWTH, seconds


def message(
    operation: Collective, total_bytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """Return a call of a collective on fp32 tensors that all ranks of the group have together, or of a whole transfer.

    A transfer goes from the first rank to the second and back, of half as many bytes each way.
    """
    elements = total_bytes // 4 // ranks * ranks
    whole, part = torch.ones(elements, device=device), torch.ones(elements // ranks, device=device)

    def there_and_back() -> None:
        transfers = {0: (dist.send, dist.recv), 1: (dist.recv, dist.send)}
        for transfer in transfers.get(dist.get_rank(), ()):
            transfer(whole[: elements // 2], 1 - dist.get_rank(), group=group)

    calls: dict[Collective, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, whole, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=group),
        "send": there_and_back,
    }
    return calls[operation]


def overlap_slowdown(watch: Stopwatch, side: int, dtype: torch.dtype) -> float:
    """Return the share of an all-reduce's time by which it slows down products that take about twice as long."""
    left, right = torch.randn(2, side, side, device=watch.device, dtype=dtype)
    gradients = torch.ones(OVERLAP_BYTES // 4, device=watch.device)
    collective = watch.median_seconds(lambda: dist.all_reduce(gradients))
    number = max(1, round(2 * collective / watch.median_seconds(lambda: left @ right)))

    def products() -> None:
        for _ in range(number):
            left @ right

    def both() -> None:
        work = dist.all_reduce(gradients, async_op=True)
        products()
        assert work is not None
        work.wait()

    alone = watch.median_seconds(products)
    return (watch.median_seconds(both) - alone) / collective
