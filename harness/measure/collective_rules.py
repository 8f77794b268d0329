"""The rules by which each collective operator is counted: its operation, and the tensors that it moves.

Bytes are counted as the literature does for ring algorithms, whichever algorithm the backend uses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "deepspeed")

# Bytes that one rank sends per byte of S, by operation, in a group of n. S is all that the operation moves: the whole
# gathered tensor of an all-gather, the whole input of a reduce-scatter (Rajbhandari et al. 2019, section 7).
SENT_PER_BYTE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,  # S is all that the root scatters, and 0 on other ranks
    "gather": lambda n: 1.0,  # S is 0 at the root, and this rank's own part elsewhere
    "send": lambda n: 1.0 if n > 1 else 0.0,
}


@dataclass(frozen=True)
class CollectiveCall:
    """The arguments of one operator by name, and its process group."""

    arguments: dict[str, Any]  # tensors, lists of them, numbers, and whatever the operator takes
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)


# The tensors that make up S, and how often each counts. The input of an all-gather counts n times if the operator does
# not have the output as an argument.
MovedTensors = list[tuple[Tensor, int]]

_Selector = Callable[[CollectiveCall], MovedTensors]


def _all(*names: str) -> _Selector:
    return lambda call: [(tensor, 1) for name in names for tensor in iter_tensors(call.arguments[name])]


def _times_group(name: str) -> _Selector:
    return lambda call: [(tensor, call.size) for tensor in iter_tensors(call.arguments[name])]


def _sends(call: CollectiveCall) -> MovedTensors:
    pairs = zip(call.arguments["op_list"], call.arguments["tensors"], strict=True)
    return [(tensor, 1) for operation, tensor in pairs if operation == "isend"]


def _unless_root(call: CollectiveCall) -> MovedTensors:
    if dist.get_rank(call.group) == call.arguments["root_rank"]:
        return []
    return [(tensor, 1) for tensor in iter_tensors(call.arguments["input_tensors"])]


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, which is a tensor, a list, or a list of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item)


_C10D: dict[str, tuple[str, _Selector]] = {
    "allreduce_": ("all_reduce", _all("tensors")),
    "allreduce_coalesced_": ("all_reduce", _all("tensors")),
    "allgather_": ("all_gather", _all("output_tensors")),
    "allgather_coalesced_": ("all_gather", _all("output_lists")),
    "_allgather_base_": ("all_gather", _all("output_tensor")),
    "allgather_into_tensor_coalesced_": ("all_gather", _all("outputs")),
    "reduce_scatter_": ("reduce_scatter", _all("input_tensors")),
    "_reduce_scatter_base_": ("reduce_scatter", _all("input_tensor")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _all("inputs")),
    "alltoall_": ("all_to_all", _all("input_tensors")),
    "alltoall_base_": ("all_to_all", _all("input")),
    "broadcast_": ("broadcast", _all("tensors")),
    "reduce_": ("reduce", _all("tensors")),
    "scatter_": ("scatter", _all("input_tensors")),
    "gather_": ("gather", _unless_root),
    "send": ("send", _all("tensors")),
}

_FUNCTIONAL: dict[str, tuple[str, _Selector]] = {
    "all_reduce": ("all_reduce", _all("input")),
    "all_reduce_": ("all_reduce", _all("input")),
    "all_reduce_coalesced": ("all_reduce", _all("inputs")),
    "all_reduce_coalesced_": ("all_reduce", _all("inputs")),
    "all_gather_into_tensor": ("all_gather", _times_group("input")),
    "all_gather_into_tensor_out": ("all_gather", _times_group("input")),
    "all_gather_into_tensor_coalesced": ("all_gather", _times_group("inputs")),
    "reduce_scatter_tensor": ("reduce_scatter", _all("input")),
    "reduce_scatter_tensor_out": ("reduce_scatter", _all("input")),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _all("inputs")),
    "all_to_all_single": ("all_to_all", _all("input")),
    "broadcast": ("broadcast", _all("input")),
    "broadcast_": ("broadcast", _all("input")),
    "isend": ("send", _all("tensor")),
    "batch_p2p_ops": ("send", _sends),
}

RULES: dict[str, tuple[str, _Selector]] = {
    **{f"c10d::{name}": rule for name, rule in _C10D.items()},
    **{f"_c10d_functional::{name}": rule for name, rule in _FUNCTIONAL.items()},
    **{f"_c10d_functional_autograd::{name}": rule for name, rule in _FUNCTIONAL.items()},
    "_dtensor::shard_dim_alltoall": ("all_to_all", _all("input")),
}

SENDS_NOTHING = {
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "c10d::check_for_nan",
    "_c10d_functional::irecv",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
