"""The measurements of one device: matrix products, attention, memory, and the host that launches kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from harness.calibration.points import AttentionPoint, LaunchPoint, MatmulPoint, MemoryPoint
from harness.calibration.stopwatch import Stopwatch
from harness.config.schema import Device

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
