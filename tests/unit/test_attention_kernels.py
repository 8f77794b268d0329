"""Attention's kernels: operations by schema, what grouped heads get, and the simulated choice by torch's rules."""

import inspect
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from harness.cost_model.activations import block_tensors
from harness.cost_model.flops import executed_flops, model_flops
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.layout.layout import resolve_layout
from harness.measure.kernels import ATTENTION, attention_backend_priority
from harness.models.decoder import causal_mask_lower_right, flash_attention
from harness.simulator.cuda_kernels import choose_kernel
from harness.simulator.fake_memory import count_storages
from harness.simulator.fake_tensors import fake_tensors
from harness.simulator.process import load_device_guard
from harness.tensors.flops import ATTENTION_FLOPS, operator_flops
from tests.support.commands import compose_config
from tests.support.models import alone

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 2, 12, 48, 80, 16

SCORES = 2 * BATCH * HEADS * QUERIES * KEYS * HEAD_DIM  # the operations of one product

aten = torch.ops.aten


def run_forward(packet: Any) -> tuple[tuple[Any, ...], Any]:
    """Return queries, keys, values and options in the layout of the operator, and what its own meta kernel makes."""
    sizes = [(BATCH, HEADS, length, HEAD_DIM) for length in (QUERIES, KEYS, KEYS)]
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    if not packet.__name__.startswith("_scaled_dot_product"):  # these are what the operators of that name call
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    additional: dict[Any, tuple[Any, ...]] = {
        aten._flash_attention_forward: (None, None, QUERIES, KEYS, 0.0, False, False),
        aten._efficient_attention_forward: (None, None, None, None, None, 0.0, 0, True),
        aten._scaled_dot_product_efficient_attention: (None, True),
        aten._scaled_dot_product_cudnn_attention: (None, True),
    }
    arguments = (*tensors, *additional.get(packet, ()))
    return arguments, packet.default(*arguments)


FORWARD = [packet for packet in ATTENTION_FLOPS if "backward" not in packet.__name__]


@pytest.mark.parametrize("packet", FORWARD, ids=lambda packet: packet.__name__)
def test_forward_is_two_products_and_backward_five_in_the_layout_of_the_schema(packet: Any) -> None:
    """The meta kernel's second result, the logarithms of sums, is by heads: so the tensors have its layout."""
    arguments, result = run_forward(packet)
    assert result[0].shape == arguments[0].shape and result[1].shape[1] == HEADS
    assert operator_flops(packet.default, arguments, {}, result) == 2 * SCORES
    backward = getattr(aten, packet.__name__.removesuffix("_forward") + "_backward")
    assert backward in ATTENTION_FLOPS
    names = [argument.name.rstrip("_") for argument in backward.default._schema.arguments[:4]]
    assert names == ["grad_out", "query", "key", "value"]
    query, key, value = arguments[:3]
    gradients = tuple(map(torch.empty_like, (query, key, value)))
    assert operator_flops(backward.default, (query, query, key, value), {}, gradients) == 5 * SCORES


def test_every_attention_kernel_that_torch_counts_has_a_rule() -> None:
    theirs = {packet for packet in flop_registry if "attention" in getattr(packet, "__name__", "")}
    raw_layout = {packet for packet in theirs if "flex" not in packet.__name__ and "varlen" not in packet.__name__}
    assert raw_layout and raw_layout <= ATTENTION_FLOPS.keys()
    assert {f"aten::{packet.__name__}" for packet in FORWARD} <= ATTENTION.keys()  # and each is known by its name


def test_packed_sequences_keep_torchs_formula() -> None:
    """Queries of several lengths have three dimensions; their lengths are in another argument."""
    query, key = (torch.empty(length, HEADS, HEAD_DIM, device="meta") for length in (QUERIES, KEYS))
    ends = torch.tensor([0, 20, QUERIES]), torch.tensor([0, 30, KEYS])
    arguments = (query, key, key, *ends, 28, 50, 0.0, False, False)
    flops = operator_flops(aten._flash_attention_forward.default, arguments, {}, (query,))
    assert flops == 4 * HEADS * HEAD_DIM * (20 * 30 + 28 * 50)


@pytest.mark.parametrize(
    ("device", "dtype", "call"),
    [
        ("cuda", torch.float32, (8, 8, False)),
        ("cuda", torch.bfloat16, (8, 2, True)),
        ("cpu", torch.float32, (8, 2, True)),
    ],
)
def test_grouped_heads_are_repeated_where_no_fused_kernel_takes_them(
    device: str, dtype: torch.dtype, call: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = Mock()
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode(), torch.no_grad():
        query, key = (torch.empty(1, heads, 32, 16, dtype=dtype, device=device) for heads in (8, 2))
        flash_attention(query, key, key)
    (query, key, *_), options = attention.call_args
    assert (query.shape[1], key.shape[1], options["enable_gqa"]) == call


def test_repeated_heads_attend_as_grouped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(2, heads, 32, 16, requires_grad=True) for heads in (8, 2, 2))

    def outputs_and_gradients() -> list[Tensor]:
        output = flash_attention(query, key, value)
        return [output, *torch.autograd.grad(output.square().sum(), (query, key, value))]

    grouped = outputs_and_gradients()
    monkeypatch.setattr("harness.models.decoder.repeats_grouped_heads", lambda query: True)
    for ours, theirs in zip(outputs_and_gradients(), grouped, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def kept(*overrides: str) -> dict[str, int]:
    config = compose_config("strategy=single", *overrides)
    return block_tensors(micro_batch_shape(config, resolve_layout(config.strategy, config.world_size or 1), "cuda"))


@pytest.mark.parametrize("parallel", [(), ("strategy=cp", "world_size=2", "strategy.data_parallel=none")])
def test_repeated_heads_are_planned_in_fp32(parallel: tuple[str, ...]) -> None:
    """In fp32 on CUDA four grouped heads keep as much as four of their own, and no scores; in 16 bit they keep half."""
    own_heads, narrow = "model.num_key_value_heads=4", "precision=bf16_mixed"
    grouped, own = kept(*parallel), kept(*parallel, own_heads)
    assert grouped == own or parallel
    assert grouped["attention.key"] == grouped["attention.value"] >= own["attention.key"]
    assert not any("weights" in name for name in grouped)
    keys = (kept(*parallel, narrow, *more)["attention.key"] for more in ((), (own_heads,)))
    assert 2 * next(keys) == next(keys)


def test_repeated_heads_run_the_operations_of_a_fused_kernel() -> None:
    grouped, mixed = compose_config("strategy=single"), compose_config("strategy=single", "precision=bf16_mixed")
    on_gpu = executed_flops(grouped, alone(grouped), "cuda")
    assert on_gpu == executed_flops(mixed, alone(mixed), "cuda") > model_flops(grouped)


def test_torchs_lower_right_mask_calls_the_kernel_of_positions_first() -> None:
    """The layouts above hold as long as torch transposes where it calls the kernel for fewer queries than keys."""
    text = inspect.getsource(torch.nn.attention.bias.CausalBias._dispatch)  # type: ignore[attr-defined]
    assert "torch.ops.aten._efficient_attention_forward(\n                    query.transpose(1, 2)," in text


def test_a_mask_of_context_parallelism_takes_no_memory_and_hides_the_future() -> None:
    """The mask that torch creates itself allocates 2 x queries x keys elements."""
    mask = causal_mask_lower_right(3, 8)
    assert mask.untyped_storage().nbytes() == 0
    query, key, value = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    visible = torch.ones(3, 8, dtype=torch.bool).tril(5)
    expected = F.scaled_dot_product_attention(query, key, value, visible)
    assert torch.equal(F.scaled_dot_product_attention(query, key, value, mask), expected)


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
    with attention_backend_priority(prefers_cudnn=True):  # on Hopper
        is_cudnn = kernel is CUDNN or (kernel is FLASH and attention.query.shape[-1] <= 128)
        assert choose_kernel(attention) == (CUDNN if is_cudnn else kernel)


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
