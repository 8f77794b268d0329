"""Errors that mean that memory ran out, in the words of the libraries that raise them, and errors that do not."""

import errno

import pytest
import torch
from torch.distributed import DistBackendError

from harness.worker.main import out_of_memory_error

# Messages as users report them; the numbers are issues of the repositories.
EXHAUSTED: dict[str, BaseException] = {
    "torch's allocator": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 11.00 MiB is"
        " free."
    ),
    "CUDA's runtime (Comfy-Org/ComfyUI 14165)": torch.AcceleratorError(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"
        " https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel"
        " errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    ),
    "pinned memory": RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions."),
    "ROCm": RuntimeError("HIP error: out of memory"),
    "NCCL's buffers (NVIDIA/nccl 1235)": DistBackendError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with"
        " NCCL_DEBUG=INFO for details), NCCL version 2.18.5\nncclUnhandledCudaError: Call to CUDA function"
        " failed.\nLast error:\nFailed to CUDA calloc 6291456 bytes"
    ),
    "NCCL's later wording": DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version"
        " 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "cuBLAS (QwenLM/Qwen3 873)": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "the host's allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "a mapped file": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "Python": MemoryError(),
}

OTHER: dict[str, BaseException] = {
    "an illegal access": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "a lost connection": DistBackendError("NCCL error: remote process exited or there was a network error"),
    "cuBLAS without its library": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "a text about memory": ValueError("out of memory"),
    "a wrong shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
}


@pytest.mark.parametrize(
    ("error", "is_exhausted"),
    [(error, errors is EXHAUSTED) for errors in (EXHAUSTED, OTHER) for error in errors.values()],
    ids=(*EXHAUSTED, *OTHER),
)
def test_memory_that_ran_out_is_recognized_whoever_reports_it(error: BaseException, is_exhausted: bool) -> None:
    assert out_of_memory_error(error) is (error if is_exhausted else None)


def test_what_torch_raises_for_a_tensor_that_is_too_large_is_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert out_of_memory_error(raised.value) is raised.value


@pytest.mark.parametrize("error", EXHAUSTED.values(), ids=EXHAUSTED)
def test_an_error_of_a_clean_up_does_not_hide_what_it_cleans_up(error: BaseException) -> None:
    """Pipelines wrap errors (`from`), and what runs in a finally or except block raises over them."""
    with pytest.raises(RuntimeError) as wrapped:
        try:
            try:
                raise error
            finally:
                raise RuntimeError("CUDA error: unspecified launch failure")
        except RuntimeError as clean_up:
            raise RuntimeError("stage 1 failed in forward") from clean_up
    assert out_of_memory_error(wrapped.value) is error
    assert out_of_memory_error(BaseExceptionGroup("ranks", [ValueError(), RuntimeError("x"), error])) is error


def test_errors_that_lead_to_each_other_are_no_endless_loop() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    assert out_of_memory_error(first) is None
