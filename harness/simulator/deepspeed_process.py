"""DeepSpeed's state of a process, set for one simulated rank and cleared before the next.

DeepSpeed chooses its accelerator once and keeps process groups for the life of a process.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional

from harness.config.schema import Device
from harness.cost_model.memory import PROCESS_BYTES
from harness.engines.deepspeed.initialize import import_deepspeed
from harness.layout.layout import Layout
from harness.measure import step_profiler
from harness.simulator.fake_tensors import OPERATORS

ACCELERATORS = {"cpu": "CPU_Accelerator", "cuda": "CUDA_Accelerator"}


def runs_deepspeed(layout: Layout) -> bool:
    """Return whether a rank of this layout trains by DeepSpeed, by itself or through Accelerate."""
    return layout.engine == "deepspeed" or (layout.engine == "accelerate" and layout.data_parallel == "none")


@contextmanager
def deepspeed_process(layout: Layout, device: Device, device_bytes: int | None) -> Iterator[None]:
    """Return a context in which DeepSpeed has its own accelerator for the device, and no groups of other ranks.

    Stages 1 and 2 ask how many bytes of the device are free (stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__), and
    flatten parameters on the host if they are too few; None is no limit. This does nothing for a layout without
    DeepSpeed, which is slow to import.
    """
    if not runs_deepspeed(layout):
        yield
        return
    with mock.patch.dict("os.environ", {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}):
        with redirect_stdout(sys.stderr):  # which DeepSpeed's logger would keep, and a simulator's answer is on it
            accelerators = importlib.import_module("deepspeed.accelerator")
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # which compiles a function
        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        accelerators.set_accelerator(getattr(module, ACCELERATORS[device])())
        total = SimpleNamespace(total_memory=2**62 if device_bytes is None else device_bytes - PROCESS_BYTES[device])
        try:
            with (
                mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: total),
                deepspeed_values(),
                mock.patch.object(functional, "linear", functional.linear),  # which stage 3 replaces
                mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
                mock.patch.object(module, "pynvml", None, create=True),  # it would read a real device's free memory
            ):
                yield
        finally:
            forget_world()


def forget_world() -> None:
    """Clear what DeepSpeed keeps of a world and its engine: its backend, its groups, and its lists of modules."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    from harness.engines.deepspeed.engine import forget_modules

    comm.cdb = None
    groups._release_process_group_references()
    forget_modules()


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
            stack.enter_context(mock.patch.object(module, "assert_ints_same_as_other_ranks", lambda ints: None))
        configure = without_batch_check(DeepSpeedEngine._configure_tensor_parallel_states)
        stack.enter_context(mock.patch.object(DeepSpeedEngine, "_configure_tensor_parallel_states", configure))
        yield


@contextmanager
def agreeing_ranks(layout: Layout, device: torch.device) -> Iterator[None]:
    """Return a context in which DeepSpeed takes other ranks to have the same lists, batches and parts as this one.

    It does nothing for a layout without DeepSpeed, which is slow to import.
    """
    if not layout.uses_deepspeed_zero:
        yield
        return
    import_deepspeed(device)
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters, utils

    configure, partition = DeepSpeedEngine._configure_tensor_parallel_states, partition_parameters.Init._partition_param
    with (
        mock.patch.object(utils, "assert_lst_len_same_as_other_ranks", lambda values: None),
        mock.patch.object(utils, "get_lst_from_rank0", lambda values: values),
        mock.patch.object(DeepSpeedEngine, "_configure_tensor_parallel_states", without_batch_check(configure)),
        mock.patch.object(partition_parameters.Init, "_partition_param", _with_filled_padding(partition)),
    ):
        yield


def without_batch_check(configure: Any) -> Any:
    """Return a function that configures tensor parallelism as another does, and removes its check of batches."""

    def configure_without_check(engine: Any, model: Any) -> None:
        configure(engine, model)
        engine.first_dataloader_check.remove()

    return configure_without_check


def _with_filled_padding(partition: Any) -> Any:
    """Return a function that partitions a parameter as another does, and fills the padding of this rank's part."""

    def partition_and_fill(init: Any, parameter: Any, *arguments: Any, **keywords: Any) -> None:
        whole = parameter.data.view(-1) if parameter.ds_tensor is None else None
        partition(init, parameter, *arguments, **keywords)
        if whole is not None:
            fill_padding(parameter.ds_tensor, whole, init._partition_rank(parameter))

    return partition_and_fill


def fill_padding(part: Tensor, whole: Tensor, place: int) -> None:
    """Fill what a part has beyond the end of the whole parameter with the parameter's first values."""
    valid = min(max(whole.numel() - place * part.numel(), 0), part.numel())
    part[valid:] = whole[: part.numel() - valid]
