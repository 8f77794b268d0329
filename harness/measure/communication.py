"""The bytes that one rank must send, counted from the collective operators that really run.

The profiled step's dispatch mode sees every operator of c10d:: and _c10d_functional::, including those of DDP's
reducer, FSDP2, DeepSpeed and pipelines, with tensors and group as arguments. An operator of these namespaces without a
rule in collective_rules raises an error, so that none is missed.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from harness.cost_model.ring import LAYOUT, LAYOUT_CALLERS, SCALARS
from harness.measure.collective_rules import (
    RULES,
    SENDS_NOTHING,
    SENT_PER_BYTE,
    CollectiveCall,
    MovedTensors,
    iter_tensors,
)
from harness.records.rank_report import Traffic

# Modules that carry out a collective for a caller: the caller's function names its purpose, and not theirs.
_NOT_CALLERS = (
    "torch.",
    "deepspeed.comm.",
    "deepspeed.utils.",
    "harness.measure.",
    "harness.probe",
    "contextlib",
    "typing_extensions",
    "functools",
)


class UncountedCollectiveError(RuntimeError):
    """The error that a collective operator without a rule ran, which would make the total wrong."""


_Key = tuple[str, tuple[int, ...], str, str]  # operation, group's ranks, dtype, purpose


class CommunicationCounter:
    """A counter of the collectives that run through it.

    `on_collective` is called after every collective, with all tensors that it reads or writes. One without a rule
    raises UncountedCollectiveError where it runs.
    """

    def __init__(self, on_collective: Callable[[CollectiveCall, list[Tensor]], None]) -> None:
        self._on_collective = on_collective
        self._bytes: dict[_Key, float] = defaultdict(float)
        self._sizes: dict[_Key, Counter[int]] = defaultdict(Counter)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator of one of NAMESPACES on plain tensors, count it, and return its result."""
        call = CollectiveCall.of(func, args, kwargs)
        if call.operator not in SENDS_NOTHING:
            self._count(call)
        result = func(*args, **kwargs)
        if call.operator in RULES or "recv" in call.operator:
            self._on_collective(call, [*iter_tensors(list(call.arguments.values())), *iter_tensors(result)])
        return result

    def _count(self, call: CollectiveCall) -> None:
        if call.operator not in RULES:
            raise UncountedCollectiveError(
                f"{call.operator} has no rule in harness/measure/collective_rules.py: its bytes are unknown"
            )
        factor = SENT_PER_BYTE[call.operation](len(call.ranks))
        tensors = call.moved_tensors()
        # Tokens for experts may be few, or none.
        scalars = call.operation != "all_to_all" and sum(tensor.numel() * times for tensor, times in tensors) <= SCALARS
        caller = calling_function() if scalars else LAYOUT
        purpose = LAYOUT if caller in LAYOUT_CALLERS else caller
        for dtype, size in _bytes_by_dtype(tensors).items():
            key = call.operation, call.ranks, dtype, purpose
            self._bytes[key] += size * factor
            self._sizes[key][size] += 1

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the traffic that was counted, by operation, group, dtype and purpose."""
        return tuple(
            Traffic(*key, self._bytes[key], sizes.total(), dict(sizes)) for key, sizes in sorted(self._sizes.items())
        )


def calling_function() -> str:
    """Return the qualified name of the function that called a collective, without the libraries that carry it out."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_CALLERS):
        frame = frame.f_back
    return frame.f_code.co_qualname


def _bytes_by_dtype(tensors: MovedTensors) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for tensor, times in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size() * times
    return sizes
