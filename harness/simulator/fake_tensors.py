"""Fake tensors on a simulated device: what tells their storages apart, and what must run without them.

A fake tensor (torch.FakeTensorMode) has shape, dtype and device, and no memory.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard

from harness.config.model import HFModelInfo, ModelConfig
from harness.models import hf_library
from harness.models.layer_trace import run_on_fakes
from harness.simulator.stand_ins import around

# Functions that compute ranks by small tensors on the host, and read their values.
_ON_HOST: tuple[tuple[Any, str], ...] = (
    (device_mesh, "init_device_mesh"),
    (DeviceMesh, "__getitem__"),
    (DeviceMesh, "_flatten"),
    (DeviceMesh, "_concatenate"),
    (_fully_shard, "_get_post_forward_mesh_info"),
)


def _pin_memory(mode: FakeTensorMode, _: Any, tensor: Tensor, *__: Any, **___: Any) -> Tensor:
    """Return a fake copy on the host: whether its memory is pinned does not show in a fake tensor."""
    with mode:
        return torch.empty_like(tensor)


def _wait_tensor(_: FakeTensorMode, __: Any, tensor: Tensor) -> Tensor:
    """Return the tensor itself, as torch's C++ operator does; its meta function returns a new one."""
    return tensor


def _grouped_mm(mode: FakeTensorMode, operator: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return the products of groups of rows, in any dtype."""
    with mode:
        return run_on_fakes(operator, arguments, keywords)


# By module and function, the value that is read on the host: none changes what is allocated or sent. Gradients are
# finite, so that no step is skipped.
READ_VALUES: dict[tuple[str, str], float] = {
    ("harness.engines.torch.loss_scaler", "update_and_check"): 1,  # the gradient norm
    ("harness.models.dropout_rng", "rank_local_rng"): 1,  # the seed of dropout's masks
    ("harness.measure.dropout_masks", "report"): 0,  # how many elements a mask keeps
    # Whether a norm or a gradient is not finite, on this rank or on any.
    ("deepspeed.runtime.utils", "is_invalid_grad_norm"): 0,
    ("deepspeed.runtime.zero.stage_1_and_2", "update_offload_overflow_tracker"): 0,
    ("deepspeed.runtime.zero.stage_1_and_2", "has_overflow"): 0,
    ("deepspeed.runtime.zero.stage3", "has_overflow"): 0,
    # The norm of a gradient under offload, and of all of them.
    ("deepspeed.runtime.zero.stage_1_and_2", "complete_grad_norm_calculation_for_cpu_offload"): 1,
    ("deepspeed.runtime.zero.stage3", "complete_grad_norm_calculation_for_cpu_offload"): 1,
    # Whether BF16_Optimizer clips its gradients, which it does in place.
    ("deepspeed.runtime.utils", "clip_tensors_by_global_norm"): 1,
}

_NOT_READERS = ("torch.", "harness.simulator.", "harness.measure.")  # modules that read on behalf of a caller


def _read_scalar(_: FakeTensorMode, operator: Any, tensor: Tensor) -> float:
    """Return the value that stands for a fake scalar. Raise NotImplementedError if none is listed for its reader."""
    frame = sys._getframe(1)
    while (reader := (frame.f_globals.get("__name__", ""), frame.f_code.co_name)) not in READ_VALUES:
        if frame.f_back is None or not reader[0].startswith(_NOT_READERS):
            raise NotImplementedError(f"{reader[1]} in {reader[0]} reads a value, which a simulation has not")
        frame = frame.f_back
    return bool(READ_VALUES[reader]) if tensor.dtype == torch.bool else READ_VALUES[reader]


# The operators that fake tensors lack, or whose results have a storage of their own that a device's do not have.
OPERATORS = {
    torch.ops.aten._pin_memory.default: _pin_memory,
    torch.ops._c10d_functional.wait_tensor.default: _wait_tensor,
    torch.ops.aten._local_scalar_dense.default: _read_scalar,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}


def on_host(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function while no fake mode is active."""
    with unset_fake_temporarily():
        return function(*arguments, **keywords)


def build_fake_model(
    mode: FakeTensorMode, stack: ExitStack, build_hf_model: Any, model: ModelConfig, info: HFModelInfo
) -> nn.Module:
    """Return the model of hf_library.build_hf_model, whose parameters and buffers become tensors of the mode.

    Accelerate's init_empty_weights cannot move a fake parameter to the meta device. Nor can transformers read whether a
    sequence's positions are consecutive, as those of the harness are: until the stack is closed, it takes them so.
    """
    from transformers import masking_utils

    stack.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None))
    built: nn.Module = on_host(build_hf_model, model, info)
    for module in built.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            fakes = {name: mode.from_tensor(tensor) for name, tensor in tensors.items() if tensor is not None}
            tensors.update(fakes)
    return built


def set_storage(set_: Any, tensor: Tensor, source: Any = None, *arguments: Any, **keywords: Any) -> Tensor:
    """Call torch.Tensor.set_, without dispatch to modes where a fake tensor is to use a storage.

    torch keeps a reference to every storage that it hands to a dispatch mode, so that it would never end.
    """
    is_fake = isinstance(tensor, FakeTensor) and isinstance(source, torch.UntypedStorage)
    with in_kernel_invocation_manager(tensor.fake_mode) if is_fake else nullcontext():  # type: ignore[attr-defined]
        result: Tensor = set_(tensor, *([] if source is None else [source]), *arguments, **keywords)
        return result


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return an address that a storage has for itself as long as it lives; a fake one has no memory to point to."""
    if storage.device.type == "meta":
        return int(storage._cdata)
    return int(torch._C.StorageBase.data_ptr(storage))  # type: ignore[attr-defined]


def tensor_address(tensor: Tensor) -> int:
    """Return the address of a fake tensor's first element."""
    return storage_address(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


def is_same_tensor(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are one fake tensor: of the same elements in the same memory."""
    pair = (first, second)
    if not all(isinstance(tensor, FakeTensor) and tensor.device.type != "meta" for tensor in pair):
        return False
    views = {(each.device, each.dtype, each.shape, each.stride(), tensor_address(each)) for each in pair}
    return len(views) == 1


def swap_fakes(mode: FakeTensorMode, swap_tensors: Any, first: Tensor, second: Tensor) -> None:
    """Swap two of a mode's tensors, which the mode's memo refers to weakly.

    torch refuses to swap a tensor with weak references. It swaps every fake parameter of a module that is moved, even
    where it would only set the data of another; one that is on the device already stays as it is.
    """
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
    if not is_same_tensor(first, second):
        swap_tensors(first, second)


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Return a context in which every new tensor is fake and its storage can be told apart from others."""
    with (
        mock.patch.object(torch.UntypedStorage, "data_ptr", storage_address),
        mock.patch.object(FakeTensor, "data_ptr", tensor_address, create=True),
        around(Tensor, "set_", set_storage),
        mock.patch.dict(fake_impls.op_implementations_dict, OPERATORS),
        # The mode believes that there is a device, and would allocate the result of torch.tensor on it.
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        FakeTensorMode() as mode,
        around(torch.utils, "swap_tensors", partial(swap_fakes, mode)),
        ExitStack() as stack,
        around(hf_library, "build_hf_model", partial(build_fake_model, mode, stack)),
    ):
        for owner, name in _ON_HOST:
            stack.enter_context(around(owner, name, on_host))
        yield mode
