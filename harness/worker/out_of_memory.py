"""The recognition of errors that mean that memory ran out, also where another allocator than torch's ran out of it."""

import errno
import re
from collections.abc import Iterator

import torch

# What libraries say whose memory does not come from torch's allocator, with the class of the error that torch raises:
#   CUDA's runtime, whatever called it (contexts, kernels, pinned memory): AcceleratorError, "CUDA error: out of
#       memory".
#   NCCL's buffers, which are allocated at a group's first collective: DistBackendError, "Failed to CUDA calloc 8388608
#       bytes" or "Cuda failure 2 'out of memory'" (NCCL's src/include/alloc.h).
#   cuBLAS and cuDNN, at their first use: RuntimeError, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)".
#   The host: RuntimeError, "DefaultCPUAllocator: can't allocate memory"; a mapped or shared file, "Cannot allocate
#       memory (12)".
_MESSAGES = re.compile(
    r"out of memory|OutOfMemory|failed to cuda (?:host )?(?:calloc|malloc|alloc)"
    r"|(?:CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|(?:can't|cannot) allocate memory",
    re.IGNORECASE,
)


def out_of_memory_error(error: BaseException | None) -> BaseException | None:
    """Return the error that says that memory ran out, or None: the error itself, or one that led to it.

    torch's pipeline stages wrap the errors that they raise, which are then causes. A clean-up that fails because memory
    ran out raises another error, of which the first is the context.
    """
    return next((entry for entry in _chain(error) if _is_out_of_memory(entry)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all that led to it, each once: causes and contexts, and the members of exception groups."""
    waiting, visited = [error], set()
    while waiting:
        entry = waiting.pop(0)
        if entry is None or id(entry) in visited:
            continue
        visited.add(id(entry))
        yield entry
        waiting += [entry.__cause__, entry.__context__]
        if isinstance(entry, BaseExceptionGroup):
            waiting += entry.exceptions


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out. All errors of torch are RuntimeErrors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None
