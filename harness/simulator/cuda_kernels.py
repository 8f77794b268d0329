"""The operators that torch runs on CUDA where its CPU build would run others: attention, RMSNorm, backward of SiLU.

A CPU build decomposes them into plain operators for every device but a CPU, because it lacks CUDA's kernels. Here they
reach the operators of these kernels, whose results torch's own meta functions describe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.library import Library
from torch.nn.attention import SDPBackend, bias

_aten = torch.ops.aten

_settings: Any = torch.backends.cuda  # whether each kernel is enabled

HALF_WIDTHS = (torch.float16, torch.bfloat16)

MAX_FLASH_HEAD_DIM = 256

GEMM_ALIGNMENT_BYTES = 16  # minimum_gemm_alignment of tensor cores from sm80 on: 128 bits


# The rules below are those of torch 2.13's select_sdp_backend (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
# for dense tensors on devices from sm80 on. Each function names the constraints that it stands for; those that are
# templates or inline functions are in the installed include/ATen/native/transformers/sdp_utils_cpp.h. Left out are
# constraints that nothing here can violate: nested tensors, sm86 with head dimensions above 192, and tensors on
# different devices.


def can_use_flash(params: SDPAParams) -> bool:
    """Return what can_use_flash_attention returns.

    Its constraints are check_runtime_disabled_flash, check_tensor_shapes, check_for_attn_mask,
    check_head_dim_size_flash, check_flash_causal_non_square_seqlens, check_dtypes_flash_attention,
    check_batch_size_and_num_heads_dense<true> (it supports grouped heads), and the two on lengths and strides.
    """
    head_dims = {params.query.shape[-1], params.key.shape[-1], params.value.shape[-1]}
    return (
        _settings.flash_sdp_enabled()
        and _is_supported(params, HALF_WIDTHS, supports_groups=True)
        and params.attn_mask is None
        and len(head_dims) == 1
        and max(head_dims) <= MAX_FLASH_HEAD_DIM
        and not (params.is_causal and params.query.shape[-2] != params.key.shape[-2])
    )


def can_use_cudnn(params: SDPAParams) -> bool:
    """Return what can_use_cudnn_attention returns, for cuDNN from version 9 on and head dimensions up to 128.

    Its constraints are check_runtime_disabled_cudnn, check_tensor_shapes, check_dtypes_low_precision,
    check_batch_size_and_num_heads_dense<true> and check_cudnn_tensor_shapes. A mask is accepted.
    """
    return (
        _settings.cudnn_sdp_enabled()
        and _is_supported(params, HALF_WIDTHS, supports_groups=True)
        and params.query.shape[-1] <= 128
        and params.query.shape[-1] % 8 == params.value.shape[-1] % 8 == 0
    )


def can_use_efficient(params: SDPAParams) -> bool:
    """Return what can_use_mem_efficient_attention returns.

    Its constraints are check_runtime_disabled_mem_efficient, check_tensor_shapes, check_head_dim_size_mem_efficient,
    check_batch_size_and_num_heads_dense<false> (it supports no grouped heads up to torch 2.13), the two on lengths and
    strides, and the dtypes of sm80.
    """
    alignment = GEMM_ALIGNMENT_BYTES // params.query.element_size()
    return (
        _settings.mem_efficient_sdp_enabled()
        and _is_supported(params, (*HALF_WIDTHS, torch.float32), supports_groups=False)
        and params.query.shape[-1] == params.key.shape[-1]
        and params.query.shape[-1] % alignment == params.value.shape[-1] % alignment == 0
    )


def _is_supported(params: SDPAParams, dtypes: tuple[torch.dtype, ...], supports_groups: bool) -> bool:
    """Return whether the constraints that all kernels share pass.

    They are check_tensor_shapes, check_nonzero_sequence_lengths, check_last_dim_stride_equals_1, check_tensor_dtype and
    check_batch_size_and_num_heads_dense.
    """
    tensors = (params.query, params.key, params.value)
    if not all(tensor.dim() == 4 and tensor.shape[-2] > 0 and tensor.stride(-1) == 1 for tensor in tensors):
        return False
    queries, keys, values = (tensor.shape[1] for tensor in tensors)
    is_grouped = params.enable_gqa and supports_groups
    return (
        params.query.dtype in dtypes
        and len({(tensor.dtype, tensor.shape[0]) for tensor in tensors}) == 1
        and keys == values
        and (queries % keys == 0 if is_grouped else queries == keys)
    )


# By kernel, its rules and the operator that scaled_dot_product_attention calls for it.
_KERNELS: dict[SDPBackend, tuple[Callable[[SDPAParams], bool], Any]] = {
    SDPBackend.FLASH_ATTENTION: (can_use_flash, _aten._scaled_dot_product_flash_attention.default),
    SDPBackend.CUDNN_ATTENTION: (can_use_cudnn, _aten._scaled_dot_product_cudnn_attention.default),
    SDPBackend.EFFICIENT_ATTENTION: (can_use_efficient, _aten._scaled_dot_product_efficient_attention.default),
    SDPBackend.MATH: (lambda _: _settings.math_sdp_enabled(), _aten._scaled_dot_product_attention_math.default),
}


def choose_kernel(params: SDPAParams) -> SDPBackend:
    """Return the first kernel in torch's present order of preference whose rules the call satisfies.

    Raise RuntimeError if there is none, as torch does.
    """
    order: list[int] = torch._C._get_sdp_priority_order()
    for number in order:
        kernel = SDPBackend(number)  # type: ignore[no-untyped-call]
        if kernel in _KERNELS and _KERNELS[kernel][0](params):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention by the operator that torch calls for the kernel of its choice on CUDA.

    The calls are those of scaled_dot_product_attention (aten/src/ATen/native/transformers/attention.cpp), without its
    padding of head dimensions that are no multiple of 8 for flash.
    """
    common = {"query": query, "key": key, "value": value, "dropout_p": dropout_p, "is_causal": is_causal}
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    masks = {"attn_mask": attn_mask, "attn_bias": attn_mask}  # operators have one or the other, or none
    values = common | masks | {"compute_log_sumexp": needs_grad, "scale": scale, "enable_gqa": enable_gqa}
    _, operator = _KERNELS[choose_kernel(SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa))]
    names = {argument.name for argument in operator._schema.arguments}
    result = operator(**{name: argument for name, argument in values.items() if name in names})
    output: Tensor = result[0]
    return output


def _never_runs(*_: Any, **__: Any) -> Any:
    """Raise RuntimeError: the tensors on the simulated device are fake, so that no kernel of its may be reached."""
    raise RuntimeError("a kernel of the simulated CUDA device was called with tensors that are not fake")


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Return a context in which torch calls the operators of CUDA's kernels for tensors on `cuda`."""
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", cuda_attention, "AutogradCUDA")
    # With a kernel for CUDA the dispatcher prefers the operator itself, and torch's formula of its gradient, to its
    # decomposition.
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward"):
        library.impl(name, _never_runs, "CUDA")
    with (
        mock.patch.object(bias, "can_use_flash_attention", can_use_flash),
        mock.patch.object(bias, "can_use_efficient_attention", can_use_efficient),
    ):
        try:
            yield
        finally:
            library._destroy()
