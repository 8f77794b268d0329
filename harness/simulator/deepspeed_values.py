"""The values of fake tensors that DeepSpeed reads, where they change neither what it allocates nor what it sends.

Every function of DeepSpeed 0.19.8 that may read a value is listed with the value that it gets. A function that is not
listed ends the simulation, as torch's own error says.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from harness.measure import step_profiler
from harness.simulator.fake_tensors import OPERATORS
from harness.simulator.virtual_deepspeed import without_batch_check

# By file and function. Gradients are finite, so that no step is skipped.
READ_VALUES: dict[tuple[str, str], float] = {
    # Whether a norm or a gradient is not finite, on this rank or on any.
    ("runtime/utils.py", "is_invalid_grad_norm"): 0,
    ("runtime/zero/stage_1_and_2.py", "update_offload_overflow_tracker"): 0,
    ("runtime/zero/stage_1_and_2.py", "has_overflow"): 0,
    ("runtime/zero/stage3.py", "has_overflow"): 0,
    # The norm of a gradient under offload, and of all of them.
    ("runtime/zero/stage_1_and_2.py", "complete_grad_norm_calculation_for_cpu_offload"): 1,
    ("runtime/zero/stage3.py", "complete_grad_norm_calculation_for_cpu_offload"): 1,
    # Whether BF16_Optimizer clips its gradients, which it does in place.
    ("runtime/utils.py", "clip_tensors_by_global_norm"): 1,
}


def reading_function() -> tuple[str, str] | None:
    """Return the file, within its package, and the name of the function of DeepSpeed that reads a value at present.

    It is the innermost function outside of torch, the simulator and the harness's measurement. Return None if another
    library has it.
    """
    import deepspeed

    skipped = tuple(str(Path(path).parent) for path in (torch.__file__, __file__, step_profiler.__file__))
    package = Path(deepspeed.__file__).parent
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(str(package)):
        return None
    return Path(frame.f_code.co_filename).relative_to(package).as_posix(), frame.f_code.co_name


def read_value(_: FakeTensorMode, operator: Any, tensor: Tensor) -> float:
    """Return the value that stands for a fake scalar.

    Raise NotImplementedError if none is listed for the function of DeepSpeed that reads it, or torch's own error if
    another library does.
    """
    reader = reading_function()
    if reader is None:
        raise DataDependentOutputException(operator)
    if reader not in READ_VALUES:
        raise NotImplementedError(f"{reader[1]} in DeepSpeed's {reader[0]} reads a value, which a simulation has not")
    value = READ_VALUES[reader]
    return bool(value) if tensor.dtype == torch.bool else value


def ranks_agree(ints: list[int]) -> None:
    """Return at once: there are no other ranks with which a list could be compared."""


@contextmanager
def deepspeed_values() -> Iterator[None]:
    """Return a context in which DeepSpeed reads the listed values.

    What it does in the first step alone to compare ranks with each other is left out.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

    reads = {torch.ops.aten._local_scalar_dense.default: read_value}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(OPERATORS, reads))
        for module in (partition_parameters, partitioned_param_coordinator, stage3):
            stack.enter_context(mock.patch.object(module, "assert_ints_same_as_other_ranks", ranks_agree))
        configure = without_batch_check(DeepSpeedEngine._configure_tensor_parallel_states)
        stack.enter_context(mock.patch.object(DeepSpeedEngine, "_configure_tensor_parallel_states", configure))
        yield
