"""What one rank must send, counted from the collective operators that really run.

A dispatch mode sees every operator of c10d:: and _c10d_functional::, those of DDP's reducer, FSDP2, DeepSpeed and
pipelines among them, with tensors and group as arguments. Bytes are the literature's, those of ring algorithms,
whatever the backend does. An operator of these namespaces without a rule here is refused, so that none goes missing.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.cost_model.communication import LAYOUT, SCALARS
from harness.records.schema import Traffic

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "deepspeed")

# Elements sent for each element of S, by operation, in a group of n. S is what the operation moves in all: the whole
# gathered tensor of an all-gather, the whole input of a reduce-scatter (Rajbhandari et al. 2019, section 7).
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,  # S at the root: all it hands out; elsewhere nothing
    "gather": lambda n: 1.0,  # S at the root: nothing; elsewhere this rank's own part
    "send": lambda n: 1.0 if n > 1 else 0.0,
}

_NO_CALLERS = (
    "torch.",
    "deepspeed.comm.",
    "deepspeed.utils.",
    "harness.measure.",
    "harness.probe",
    "contextlib",
    "functools",
)


class UncountedCollectiveError(RuntimeError):
    """A collective operator ran for which there is no rule: the total would be wrong."""


_Key = tuple[str, tuple[int, ...], str, str]  # operation, ranks, width, purpose


@dataclass(frozen=True)
class _Call:
    """One operator's arguments by name, and the group they name."""

    arguments: dict[str, Any]
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)


# Which tensors make up S, by operator. A gathered tensor is n inputs where only those are at hand.
_Moved = Callable[[_Call], list[tuple[Tensor, int]]]


def _all(*names: str) -> _Moved:
    return lambda call: [(tensor, 1) for name in names for tensor in _tensors(call.arguments[name])]


def _times_group(name: str) -> _Moved:
    return lambda call: [(tensor, call.size) for tensor in _tensors(call.arguments[name])]


def _sends(call: _Call) -> list[tuple[Tensor, int]]:
    pairs = zip(call.arguments["op_list"], call.arguments["tensors"], strict=True)
    return [(tensor, 1) for operation, tensor in pairs if operation == "isend"]


def _unless_root(call: _Call) -> list[tuple[Tensor, int]]:
    if dist.get_rank(call.group) == call.arguments["root_rank"]:
        return []
    return [(tensor, 1) for tensor in _tensors(call.arguments["input_tensors"])]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument: itself, a list, or a list of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


_C10D: dict[str, tuple[str, _Moved]] = {
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

_FUNCTIONAL: dict[str, tuple[str, _Moved]] = {
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

_RULES: dict[str, tuple[str, _Moved]] = {
    **{f"c10d::{name}": rule for name, rule in _C10D.items()},
    **{f"_c10d_functional::{name}": rule for name, rule in _FUNCTIONAL.items()},
    **{f"_c10d_functional_autograd::{name}": rule for name, rule in _FUNCTIONAL.items()},
    "_dtensor::shard_dim_alltoall": ("all_to_all", _all("input")),
    # DeepSpeed's all-reduce through shared memory, always over the world; it names its tensor differently by version.
    "deepspeed::inference_all_reduce": ("all_reduce", lambda call: _all(*call.arguments)(call)),
    "deepspeed::inference_all_reduce_": ("all_reduce", lambda call: _all(*call.arguments)(call)),
}

_SENDS_NOTHING = {
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "c10d::check_for_nan",
    "_c10d_functional::irecv",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


def has_rule(operator: str) -> bool:
    """Whether an operator such as c10d::allreduce_ is counted or known to send nothing."""
    return operator in _RULES or operator in _SENDS_NOTHING


class Collective(NamedTuple):
    """One collective: the tensors it reads or writes, and the global ranks that take part."""

    operation: str
    group_ranks: tuple[int, ...]
    tensors: list[Tensor]
    operator: str  # that ran, such as c10d::allreduce_


class CommunicationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while entered; it slows every operator, so it belongs in a step that is not timed.

    `told` hears every call when it is done. Raises UncountedCollectiveError, where it runs, for a collective without a
    rule.
    """

    def __init__(self, on_collective: Callable[[Collective], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told = on_collective
        self._bytes: dict[_Key, float] = defaultdict(float)
        self._sizes: dict[_Key, Counter[int]] = defaultdict(Counter)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See profile.Watch."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it come back as the plain operators it is made of
        if func.namespace not in NAMESPACES:
            return func(*args, **(kwargs or {}))
        heard = self._count(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if heard is not None and self._told is not None:
            self._told(heard._replace(tensors=[*heard.tensors, *_tensors(result)]))
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Collective | None:
        name = func._schema.name
        parameters = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        if name in _SENDS_NOTHING:
            return Collective("recv", (), list(_tensors(list(arguments.values()))), name) if "recv" in name else None
        if name not in _RULES:
            raise UncountedCollectiveError(
                f"{name} has no rule in harness/measure/communication.py: its bytes are unknown"
            )
        call = _Call(arguments, _group(arguments))
        operation, moved = _RULES[name]
        ranks = tuple(dist.get_process_group_ranks(call.group))
        factor = _SENT[operation](len(ranks))
        tensors = moved(call)
        scalars = sum(tensor.numel() * times for tensor, times in tensors) <= SCALARS
        purpose = calling_function() if scalars else LAYOUT
        for dtype, size in _bytes_by_dtype(tensors).items():
            self._bytes[operation, ranks, dtype, purpose] += size * factor
            self._sizes[operation, ranks, dtype, purpose][size] += 1
        return Collective(operation, ranks, list(_tensors(list(arguments.values()))), name)

    def traffic(self) -> tuple[Traffic, ...]:
        """What was counted, by operation, group, width and purpose."""
        return tuple(
            Traffic(*key, self._bytes[key], sizes.total(), dict(sizes)) for key, sizes in sorted(self._sizes.items())
        )


def calling_function() -> str:
    """The function that asked for a collective, past the libraries that carry it out: TorchEngine.totals."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NO_CALLERS):
        frame = frame.f_back
    return frame.f_code.co_qualname


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """The process group among an operator's arguments, given as an object, boxed or by name; None is the world."""
    given = arguments.get("process_group", arguments.get("group_name"))
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, str):
        return _resolve_process_group(given)  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(given)


def _bytes_by_dtype(moved: list[tuple[Tensor, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for tensor, times in moved:
        total[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size() * times
    return total


def bytes_sent(traffic: Sequence[Traffic]) -> float:
    """All a rank must send."""
    return sum(entry.bytes_sent for entry in traffic)
