"""The kernel that an operator launches, and its seconds on a device by the planner's own functions.

Left out, as in the planner, are the differences between kernels that move equally many bytes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.config.hardware import HardwareConfig
from harness.cost_model.node_groups import RankGroup
from harness.cost_model.timing.collectives import all_reduce_seconds, gather_seconds, send_seconds
from harness.cost_model.timing.kernels import PAYLOAD, fused_attention_flops, host_update_seconds, kernel_rates
from harness.measure.collective_rules import iter_tensors


class Product(NamedTuple):
    """A batch of products of an (m, k) with a (k, n) matrix in a dtype by torch's name.

    The rows of a grouped product belong to several such matrices.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    width: int  # bytes per element
    matrices: int = 1


class AttentionKernel(NamedTuple):
    """A fused attention kernel, forward or backward; the mask leaves a share of the scores to be computed."""

    queries: int  # of all sequences of the batch
    keys: int  # that a query may see
    heads: int
    head_dim: int
    computed_share: float
    dtype: str
    is_backward: bool
    is_cudnn: bool = False


class Movement(NamedTuple):
    """A kernel that does little more than read and write so many bytes of device memory."""

    bytes: int


class HostLinkCopy(NamedTuple):
    """A copy between device and host."""

    bytes: int


class HostWork(NamedTuple):
    """An operator that the host itself carries out, such as the update of offloaded state, on so many bytes.

    In its time the host launches nothing.
    """

    bytes: int


class Collective(NamedTuple):
    """A collective of so many bytes, counted as in harness.measure.collective_rules, among global ranks."""

    operation: str
    bytes: int
    ranks: tuple[int, ...]


TransferPart = tuple[Literal["send", "receive"], int, int]  # its direction, the other rank, and its bytes


class Transfers(NamedTuple):
    """Sends to ranks and receives from them that one kernel carries out; links carry both directions at once."""

    rank: int
    parts: tuple[TransferPart, ...]


Communication = Collective | Transfers
Work = Product | AttentionKernel | Movement | HostLinkCopy | HostWork | Communication


@lru_cache(maxsize=65536, typed=True)  # a copy and a movement of equally many bytes are equal tuples
def work_seconds(work: Work, hardware: HardwareConfig, gpus_per_node: int) -> float:
    """Return the seconds of a kernel where nothing else runs; 0 for the host's where its bandwidth is not known.

    Raise UserError if the device's peak in a product's dtype is unknown.
    """
    bandwidth = hardware.memory_bandwidth * hardware.fitted.memory_efficiency
    host_bandwidth = hardware.host_bandwidth or math.inf
    match work:
        case Product(batch, m, n, k, dtype, width, matrices):
            rates = kernel_rates(hardware, dtype)
            single = rates.product_seconds(m, n, k, width, matrices) - rates.kernel_seconds
            return batch * single + rates.kernel_seconds
        case AttentionKernel(queries, keys, heads, head_dim, computed_share, dtype, is_backward, is_cudnn):
            rates = kernel_rates(hardware, dtype)
            flops = fused_attention_flops(queries, keys, heads, head_dim, computed_share)
            return rates.attention_seconds(flops, is_backward=is_backward, is_cudnn=is_cudnn)
        case Movement(size):
            return size / bandwidth + hardware.fitted.kernel_seconds
        case HostLinkCopy(size):
            return size / (host_bandwidth * PAYLOAD)
        case HostWork(size):
            return host_update_seconds(size / bandwidth, hardware.memory_bandwidth, host_bandwidth)
        case Collective(operation, size, ranks):
            # The ranks fill one node after another.
            group = RankGroup(len(ranks), len({rank // gpus_per_node for rank in ranks}))
            seconds = all_reduce_seconds if operation == "all_reduce" else gather_seconds
            return seconds(size, group, hardware)
        case Transfers(rank, parts):
            node = rank // gpus_per_node
            strides = ((1 if peer // gpus_per_node == node else gpus_per_node, size) for _, peer, size in parts)
            return max(send_seconds(size, stride, gpus_per_node, hardware) for stride, size in strides)


# Operators that launch no kernel although their results are new or they change an argument.
_WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_", "set_"),
    *("detach_", "record_stream", "_pin_memory", "is_pinned", "is_same_size", "lift_fresh", "_local_scalar_dense"),
}

# Operators that write their first argument, or lists of it, without reading it.
_WRITE_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}

# Operators that read as many elements of their first argument as they return.
_GATHERS = {"embedding", "index_select", "gather", "index", "nll_loss_forward"}

# Operators that do not read an argument, which they have for its shape: its place.
_UNREAD = {"nll_loss_backward": 1}

# Operators that write a result of zeros before they add their first argument to rows of it.
_SCATTERS = {"embedding_dense_backward", "nll_loss_backward", "scatter", "index_put"}

# The ends of the names of fused attention kernels.
_ATTENTION = ("_attention", "_attention_backward", "_attention_forward")

# The places of the two factors.
_PRODUCTS = {"mm": (0, 1), "_scaled_mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}

_CAUSAL_UPPER_LEFT, _CAUSAL_LOWER_RIGHT = 1, 2  # custom_mask_type of the memory-efficient kernel


class WorkCache:
    """The kernels of operators by their arguments; most of a step's thousands of operators are the same few."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.works: dict[Any, Work | None] = {}

    def work_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
        """Return the kernel that an operator launches on the device, or None."""
        if launches_nothing(func):
            return None
        key = (func, signature(args), signature(tuple(kwargs.items())) if kwargs else ())
        if key not in self.works:
            self.works[key] = kernel_of(func, args, kwargs, result, self.device_type)
        return self.works[key]


@cache
def launches_nothing(func: Any) -> bool:
    """Return whether an operator never launches a kernel: views, and allocations without values."""
    return func.is_view or func._opname in _WITHOUT_KERNEL or func.namespace in ("prim", "prims")


def signature(value: Any) -> Any:
    """Return what an operator's kernel depends on: shapes, strides, dtypes and devices of tensors, and plain values."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, device_type_of(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    return value if isinstance(value, (int, float, str, torch.dtype)) else type(value)


def device_type_of(tensor: Tensor) -> str:
    """Return the type of a tensor's device; a fake tensor has it without an operator that asks for it."""
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device.type


def kernel_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, device_type: str) -> Work | None:
    """Return the kernel that an operator launches on a device of this type, what the host does itself, or None."""
    inputs, outputs = list(iter_tensors([args, list(kwargs.values())])), list(iter_tensors(result))
    devices = {device_type_of(tensor) for tensor in (*inputs, *outputs) if tensor.dim() or len(inputs) == 1}
    if device_type not in devices:
        return HostWork(moved_bytes(func, args, kwargs, outputs)) if devices else None
    name = func._opname
    if devices > {device_type} and name in ("_to_copy", "copy_"):
        return HostLinkCopy(_tensor_bytes(outputs[0]))
    if name.endswith(_ATTENTION):
        return _attention(func, args, kwargs)
    if name in _PRODUCTS:
        first, second = (args[place] for place in _PRODUCTS[name])
        *batch, m, k = first.shape
        return Product(math.prod(batch), m, second.shape[-1], k, _dtype_name(first), first.element_size())
    if name == "_grouped_mm":
        first, second = inputs[:2]
        m, k = first.shape if second.dim() == 3 else first.shape[::-1]  # a weight's gradient has rows along k
        return Product(1, m, second.shape[-1], k, _dtype_name(first), first.element_size(), len(args[2]))
    return Movement(moved_bytes(func, args, kwargs, outputs))


def _attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionKernel:
    """Return the attention kernel of an operator."""
    heads_dim, positions_dim = (1, 2) if func._opname.startswith("_scaled_dot_product") else (2, 1)
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    query, key = values["query"], values["key"]
    batch, queries, keys = query.shape[0], query.shape[positions_dim], key.shape[positions_dim]
    return AttentionKernel(
        batch * queries,
        keys,
        query.shape[heads_dim],
        query.shape[-1],
        computed_share(queries, keys, values.get("is_causal"), values.get("custom_mask_type")),
        _dtype_name(query),
        is_backward=func._opname.endswith("_backward"),
        is_cudnn="cudnn" in func._opname,
    )


def computed_share(queries: int, keys: int, is_causal: Any, mask_type: Any) -> float:
    """Return the share of scores that a kernel computes which skips those that a causal mask hides.

    A mask aligned to the last key leaves a query all keys but those after its own position.
    """
    if mask_type == _CAUSAL_LOWER_RIGHT:
        return 1 - queries / (2 * keys)
    return 0.5 if is_causal or mask_type == _CAUSAL_UPPER_LEFT else 1.0


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that a kernel reads of its arguments and writes to its results."""
    name, total = func._opname, 0
    written: set[int] = set()
    if name == "all_gather_copy_in":  # a part of the buffer that is to be gathered
        return 2 * sum(map(_tensor_bytes, iter_tensors(args[0])))
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        size = sum(map(_tensor_bytes, iter_tensors(value)))
        if argument.is_write:
            written.update(map(id, iter_tensors(value)))
            size *= 1 if name in _WRITE_ONLY or argument.is_out else 2
        elif place == 0 and name in _GATHERS:
            size = min(size, _tensor_bytes(outputs[0]))
        elif place == 0 and name in _SCATTERS:
            size *= 2
        total += 0 if _UNREAD.get(name) == place else size
    return total + sum(_tensor_bytes(tensor) for tensor in outputs if id(tensor) not in written)


def _dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, by which a device's rate is known: one for all kinds of float8."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "float8_e4m3fn" if name.startswith("float8") else name


def _tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded dimension is stored once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()
