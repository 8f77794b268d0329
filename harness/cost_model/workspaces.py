"""The workspaces of cuBLAS, which torch takes from its own allocator on CUDA."""

_MIB = 2**20

# By torch's CublasHandlePool.cpp (parseChosenWorkspaceSize): 32 MiB on devices of compute capability 9, 10 and 12, and
# 8 MiB + 128 KiB (":4096:2:16:8") on others, where a plan is 48 MiB too high. CUBLAS_WORKSPACE_CONFIG changes it.
# cuBLASLt has the same workspace unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
_HANDLE_BYTES = 32 * _MIB

# There is a workspace for each handle and stream (setWorkspaceForHandle), and a thread has a handle of its own: that of
# forward, and the one in which autograd runs backward. Products run in the default stream alone.
_HANDLES = 2

WORKSPACE_BYTES = _HANDLES * _HANDLE_BYTES  # allocated from a rank's first products to its end
