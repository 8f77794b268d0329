"""The simulated choice of an attention kernel, by torch's rules for CUDA, and the guard's place before torch."""

from pathlib import Path

import pytest
import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.measure.kernels import attention_backend_priority
from harness.simulator.cuda_kernels import choose_kernel
from harness.simulator.fake_memory import count_storages
from harness.simulator.fake_tensors import fake_tensors
from harness.simulator.process import load_device_guard

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


def call(
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (8, 8),
    lengths: tuple[int, int] = (64, 64),
    head_dim: int = 64,
    has_mask: bool = False,
    enable_gqa: bool = True,
) -> SDPAParams:
    query, key = (
        torch.empty(2, number, length, head_dim, dtype=dtype, device="meta")
        for number, length in zip(heads, lengths, strict=True)
    )
    is_causal = not has_mask and lengths[0] == lengths[1]
    mask = torch.empty(lengths, device="meta") if has_mask else None
    return SDPAParams(query, key, key, mask, 0.0, is_causal, enable_gqa)


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        (call(torch.bfloat16), FLASH),
        (call(torch.float16, heads=(8, 2)), FLASH),
        (call(torch.bfloat16, has_mask=True), CUDNN),  # flash takes no mask
        (call(torch.bfloat16, heads=(8, 3)), MATH),  # the groups differ in size
        (call(torch.bfloat16, head_dim=264), EFFICIENT),  # flash has 256 at most, cuDNN 128
        (call(), EFFICIENT),
        (call(has_mask=True), EFFICIENT),
        (call(heads=(8, 2)), MATH),  # the efficient kernel has no groups
        (call(heads=(8, 2), enable_gqa=False), MATH),
        (call(head_dim=66), MATH),  # not aligned to 16 bytes
        (call(torch.float64), MATH),
    ],
)
def test_the_kernel_is_the_one_that_torch_would_choose(attention: SDPAParams, kernel: SDPBackend) -> None:
    with attention_backend_priority():
        assert choose_kernel(attention) == kernel


def test_disabled_kernels_are_not_chosen() -> None:
    with sdpa_kernel([MATH]):
        assert choose_kernel(call(torch.bfloat16)) == MATH
    with sdpa_kernel([FLASH]), pytest.raises(RuntimeError, match="No available kernel"):
        choose_kernel(call())


def test_the_guard_is_loaded_before_torch_or_not_at_all(tmp_path: Path) -> None:
    """Loaded later it would be there, but autograd would refuse its device: "no accelerator"."""
    with pytest.raises(RuntimeError, match="torch is imported already"):
        load_device_guard(str(tmp_path / "guard.so"))


def test_torch_has_the_rules_that_are_simulated() -> None:
    """With PR 191085 the efficient kernel supports groups, and this template gets another parameter, `supports_mqa`."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "native" / "transformers" / "sdp_utils_cpp.h"
    template = "template <bool supports_gqa, bool requires_same_num_heads=true>"
    following = "inline bool check_batch_size_and_num_heads_dense("
    assert f"{template}\n{following}" in header.read_text(), (
        "read select_sdp_backend of this torch again: harness/simulator/cuda_kernels.py"
    )


def test_waiting_for_a_collective_allocates_nothing() -> None:
    """Its meta function returns a new tensor, and torch's kernel the tensor itself."""
    with fake_tensors(), count_storages("cpu"):
        result = torch.empty(1024)
        waited = torch.ops._c10d_functional.wait_tensor(result)
        assert waited.untyped_storage()._cdata == result.untyped_storage()._cdata


def test_a_storage_that_a_tensor_was_set_to_ends_with_it() -> None:
    """The dispatch of torch would keep it for good, and with it what activation offload copies to the host."""
    with fake_tensors(), count_storages("cpu") as counter:
        first, second = torch.empty(1000), torch.empty(0)
        second.set_(first.untyped_storage(), 0, (10,), (1,))
        del first
        assert counter.live_bytes() == 4000
        del second
        assert counter.live_bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_converts_operands_in_memory_of_its_own(dtype: torch.dtype) -> None:
    """What the profiler of torch sees of a real sum is what the simulation counts beside its result."""
    total, summand = torch.zeros(1000, 10), torch.zeros(1000, 10, dtype=dtype)
    with torch.profiler.profile(profile_memory=True) as profiled:
        total.add_(summand)
    real = max((event.cpu_memory_usage for event in profiled.events()), default=0)
    with fake_tensors(), count_storages("cpu") as counter:
        fake_total, fake_summand = torch.zeros(1000, 10), torch.zeros(1000, 10, dtype=dtype)
        before = counter.live_bytes()
        counter.reset_peak()
        fake_total.add_(fake_summand)
        assert counter.peak_bytes() - before == real == (0 if dtype == torch.float32 else 40_000)
