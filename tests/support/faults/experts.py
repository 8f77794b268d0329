"""Mixtures of experts whose gradients, tokens or places are otherwise than they should be.

The first four are faults that other projects had in their releases.
"""

import functools
from typing import Any

import torch

from harness.models import grouped
from tests.support.plant import replaces

TORCH, MIXTURE = "harness.engines.torch", "harness.models.mixture.MixtureOfExperts"

EXCHANGE = f"{TORCH}.expert_parallel.ExchangedExperts.__call__"


@replaces(f"{TORCH}.fsdp.average_over")
def experts_scaled_by_ep(ordinary: Any, experts: Any, ranks: int, is_sharded: bool) -> None:
    """Average experts' gradients over the ranks that have the same ones (Megatron-LM 5956: ep times too large)."""
    ordinary(experts, ranks // 2, is_sharded)


@replaces("torch._foreach_div_")
def experts_summed(ordinary: Any, gradients: Any, divisor: Any) -> None:
    """Leave out the average of experts' gradients, half of which doubles them on two ranks (pytorch 160285)."""
    ordinary(gradients, divisor / 2)


@replaces(EXCHANGE)
def tokens_of_others_without_gradient(ordinary: Any, self: Any, rows: Any, *others: Any) -> Any:
    """Leave a part of the gradient out: that of tokens which the first experts compute (transformers 48205)."""
    first = torch.arange(len(rows), device=rows.device).unsqueeze(1) < len(rows) // 2
    return ordinary(self, torch.where(first, rows.detach(), rows), *others)


@replaces(f"{MIXTURE}.route")
def router_detached(ordinary: Any, *arguments: Any) -> Any:
    """Choose experts without a gradient for the weights of their outputs (NeMo Automodel 2995)."""
    weights, experts = ordinary(*arguments)
    return weights.detach() + 0 * weights, experts


@replaces("harness.models.build.balancing_weight")
def balanced_by_micro_batch(ordinary: Any, config: Any, layout: Any) -> float:
    """Average the loss that balances experts over the sequences of a micro-batch, and not of a rank's step."""
    return layout.grad_accumulation_steps(config.train) * ordinary(config, layout)  # type: ignore[no-any-return]


@replaces("harness.models.build.balancing_weight")
def balanced_by_every_rank(ordinary: Any, config: Any, layout: Any) -> float:
    """Average the loss that balances experts over all sequences of the step on each rank, which average once more."""
    return ordinary(config, layout) / layout.dp  # type: ignore[no-any-return]


@replaces("harness.models.hf_library.build_hf_model")
def router_of_library_detached(ordinary: Any, *arguments: Any) -> Any:
    """Give the experts of a library's model the weights of their outputs without their gradients."""
    built = ordinary(*arguments)
    for module in built.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.register_forward_pre_hook(lambda _, args: (*args[:2], args[2].detach() + 0 * args[2]))
    return built


@replaces(EXCHANGE)
def tokens_in_another_order(ordinary: Any, *arguments: Any) -> Any:
    """Return the outputs of two neighboring tokens in each other's places."""
    outputs = ordinary(*arguments)
    pairs = torch.arange(len(outputs), device=outputs.device)
    return outputs[(pairs ^ 1).clamp(max=len(outputs) - 1)]


@replaces(EXCHANGE)
def tokens_dropped(ordinary: Any, self: Any, rows: Any, weights: Any, counts: Any) -> Any:
    """Let no expert compute more than one and a quarter times an even share of the tokens."""
    capacity = int(1.25 * len(rows) / len(counts))
    place = torch.cat([torch.arange(count, device=rows.device) for count in counts.tolist()])
    return ordinary(self, rows, weights, counts) * (place < capacity).unsqueeze(1)


@replaces("harness.models.projections.SwiGLU.forward")
def shared_experts_detached(ordinary: Any, self: Any, hidden: Any) -> Any:
    """Return the output of shared experts that pass no gradient to the layers before them."""
    return ordinary(self, hidden.detach())


@replaces(f"{TORCH}.expert_parallel.shard_experts")
def experts_whole(_: Any, model: Any, mesh: Any) -> None:
    """Leave all experts on all ranks, each of which uses its own."""
    for module in model.modules():
        if isinstance(module, grouped.GroupedLinear):
            part = len(module.weight) // mesh["ep"].size()
            own = slice(mesh.get_local_rank("ep") * part, (1 + mesh.get_local_rank("ep")) * part)
            module.forward = functools.partial(product_of_part, module, own)


def product_of_part(module: Any, own: slice, rows: Any, ends: Any) -> Any:
    return grouped.GroupedProduct.apply(rows, module.weight[own], ends)


@replaces("harness.models.grouped.SumRows.backward")
def last_use_without_gradient(_: Any, ctx: Any, gradient: Any) -> Any:
    """Leave out the gradient of each token's last expert."""
    token_of_row, rows_of_token = ctx.saved_tensors
    rows = grouped.copy_rows(gradient, token_of_row, rows_of_token)
    rows[rows_of_token[:, -1]] = 0
    return rows, None, None


@replaces("harness.engines.torch.fsdp.fsdp_dim")
def few_experts_padded(_: Any, *__: Any) -> int:
    """Divide experts that are fewer than the shards along their first dimension, which torch pads."""
    return 0
