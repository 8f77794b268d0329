"""The operations of every fused attention kernel by the layout of its schema, and the kernel that grouped heads get."""

import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from harness.cost_model.activations import block_tensors
from harness.cost_model.flops import executed_flops, model_flops
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.layout.layout import resolve_layout
from harness.measure.kernels import ATTENTION
from harness.models.decoder import causal_mask_lower_right, flash_attention
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
