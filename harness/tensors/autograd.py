"""What autograd's engine would do with tensors that have memory, where fake ones are in their place."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

STORAGE_AND_ITS_OBJECT = 2  # references to a storage with one tensor, while Python has an object of it

# Modules whose code runs between the engine and an operator that it calls.
DISPATCHERS = (
    *("harness.simulator.fake_memory", "harness.measure.step_profiler", "harness.models.layer_trace"),
    *(__name__, "torch._ops"),
)


def is_accumulation(earlier: Any, gradient: Any) -> bool:
    """Return whether autograd's engine sums two gradients that it would sum in place if they were not fake.

    It does so with the last reference to the earlier one and to its storage, to which a view is a second one, and never
    while a dispatch mode is entered (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp).
    """
    tensors = isinstance(earlier, Tensor) and isinstance(gradient, Tensor)
    if torch.is_grad_enabled() or not tensors or not is_called_by_engine():
        return False
    references = torch._C._storage_Use_Count(earlier.untyped_storage()._cdata)
    is_last = earlier._use_count() <= gradient._use_count()  # the engine has one reference to each of them
    return is_last and references == STORAGE_AND_ITS_OBJECT


def is_called_by_engine() -> bool:
    """Return whether autograd's engine has called the operator that is dispatched, with no Python code between.

    The engine's thread of a device has no frames of its own, and that of a CPU is the one that calls backward.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_globals["__name__"] not in DISPATCHERS:
            return False
        frame = frame.f_back
    return True
