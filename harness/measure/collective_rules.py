"""The rules by which each collective operator is counted: its operation, and the tensors that it moves.

Bytes are counted as the literature does for ring algorithms, whichever algorithm the backend uses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "deepspeed")

# Bytes that one rank sends per byte of S, by operation, in a group of n. S is all that the operation moves: the whole
# gathered tensor of an all-gather, the whole input of a reduce-scatter (Rajbhandari et al. 2019, section 7).
SENT_PER_BYTE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    # S of a scatter is all that the root scatters, and 0 on other ranks.
    **dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "reduce", "scatter"), lambda n: (n - 1) / n),
    "all_to_all": lambda n: 1.0,  # S is all that the rank sends to others, which may be uneven
    "gather": lambda n: 1.0,  # S is 0 at the root, and this rank's own part elsewhere
    "send": lambda n: 1.0 if n > 1 else 0.0,
}


@dataclass(frozen=True)
class CollectiveCall:
    """One call of an operator of these namespaces."""

    operator: str  # such as c10d::allreduce_
    arguments: dict[str, Any]  # by name: tensors, lists of them, numbers, and whatever the operator takes

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Self:
        """Return the call of an operator with these arguments."""
        names = (argument.name for argument in func._schema.arguments)
        return cls(func._schema.name, dict(zip(names, args, strict=False)) | kwargs)

    @property
    def operation(self) -> str:
        """The operation as SENT_PER_BYTE names it, or recv for what sends nothing."""
        return RULES[self.operator][0] if self.operator in RULES else "recv"

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, which is an argument: an object, a boxed one or a name. None is the world."""
        group = self.arguments.get("process_group", self.arguments.get("group_name"))
        if group is None or isinstance(group, dist.ProcessGroup):
            return group
        if isinstance(group, str):
            return _resolve_process_group(group)  # type: ignore[arg-type]
        return dist.ProcessGroup.unbox(group)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def moved_tensors(self) -> "MovedTensors":
        """Return the tensors that make up S, and how often each counts."""
        return RULES[self.operator][1](self)


# The tensors that make up S, and how often each counts. The input of an all-gather counts n times if the operator does
# not have the output as an argument.
MovedTensors = list[tuple[Tensor, int]]

_Selector = Callable[[CollectiveCall], MovedTensors]


def _all(name: str) -> _Selector:
    return lambda call: [(tensor, 1) for tensor in iter_tensors(call.arguments[name])]


def _times_group(name: str) -> _Selector:
    return lambda call: [(tensor, len(call.ranks)) for tensor in iter_tensors(call.arguments[name])]


def _sends(call: CollectiveCall) -> MovedTensors:
    pairs = zip(call.arguments["op_list"], call.arguments["tensors"], strict=True)
    return [(tensor, 1) for operation, tensor in pairs if operation == "isend"]


def _to_others(name: str) -> _Selector:
    """Select the parts of a tensor that go to other ranks: equal ones, or as many rows as the call says."""

    def select(call: CollectiveCall) -> MovedTensors:
        own, sizes = dist.get_rank(call.group), call.arguments.get("input_split_sizes")
        tensors = list(iter_tensors(call.arguments[name]))
        if len(tensors) == 1:
            flat, ranks = tensors[0].flatten(), len(call.ranks)
            row = flat.numel() // max(1, sum(sizes)) if sizes else flat.numel() // ranks
            tensors = list(torch.split(flat, [row * number for number in sizes or [1] * ranks]))
        return [(tensor, 1) for rank, tensor in enumerate(tensors) if rank != own]

    return select


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


# By operator, the operation, and the argument with the tensors that make up S.
_C10D = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "scatter_": ("scatter", "input_tensors"),
    "send": ("send", "tensors"),
}

_FUNCTIONAL = {
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
    "isend": ("send", "tensor"),
}

# Their output, which is S, is no argument.
_FUNCTIONAL_GATHERS = {
    "all_gather_into_tensor": "input",
    "all_gather_into_tensor_out": "input",
    "all_gather_into_tensor_coalesced": "inputs",
}

RULES: dict[str, tuple[str, _Selector]] = {
    **{f"c10d::{name}": (operation, _all(argument)) for name, (operation, argument) in _C10D.items()},
    "c10d::gather_": ("gather", _unless_root),
    "c10d::alltoall_": ("all_to_all", _to_others("input_tensors")),
    "c10d::alltoall_base_": ("all_to_all", _to_others("input")),
    "_dtensor::shard_dim_alltoall": ("all_to_all", _to_others("input")),
}
for _namespace in ("_c10d_functional", "_c10d_functional_autograd"):
    RULES |= {
        f"{_namespace}::{name}": (operation, _all(argument)) for name, (operation, argument) in _FUNCTIONAL.items()
    }
    RULES |= {f"{_namespace}::{name}": ("all_gather", _times_group(key)) for name, key in _FUNCTIONAL_GATHERS.items()}
    RULES[f"{_namespace}::all_to_all_single"] = ("all_to_all", _to_others("input"))
    RULES[f"{_namespace}::batch_p2p_ops"] = ("send", _sends)

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
