"""An MLP that is a mixture of experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from harness.config.model import ModelConfig
from harness.models.grouped import copy_rows, count_tokens, sorted_places, sum_rows
from harness.models.projections import Projections, SwiGLU


def no_listener(counts: Tensor) -> None:
    """Notice nothing."""


class BalancedWeights(Function):
    """The weights of experts, in whose backward the gradient of a loss is added to that of the router's probabilities.

    No rank of a pipeline but the last has the model's loss, so that this one cannot be added to it. Megatron-LM injects
    it alike (moe/moe_utils.py, MoEAuxLossAutoScaler).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, weights: Tensor, probabilities: Tensor, slopes: Tensor) -> Tensor:
        """Return the weights (tokens, experts per token); the probabilities are (tokens, experts).

        `slopes` (sequences, experts) is the loss's derivative by each probability of a sequence's tokens.
        """
        ctx.save_for_backward(slopes)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of weights and probabilities."""
        (slopes,) = ctx.saved_tensors
        return gradient, slopes.repeat_interleave(len(gradient) // len(slopes), dim=0), None


class Experts(Projections):
    """The MLPs of all experts, each a SwiGLU, over the rows that the router has given them."""

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted outputs, shaped as rows (rows, hidden), which are sorted by their expert.

        Each row has a weight (rows,), and each expert a number of rows (experts,).
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = F.silu(self.gate_proj(rows, ends)) * self.up_proj(rows, ends)  # type: ignore[operator]
        return self.down_proj(inner * weights.unsqueeze(-1), ends)  # type: ignore[operator, no-any-return]


class MixtureOfExperts(Projections):
    """An MLP in which a few experts, chosen by a router, compute each token (arXiv 2101.03961, 2401.04088).

    No token is dropped, however many the router gives to an expert. Shared experts, one wide MLP, compute every token
    beside them (arXiv 2401.06066).
    """

    def __init__(self, model: ModelConfig, branch: str) -> None:
        super().__init__(model, branch)
        self.config = model
        self.announce: Callable[[Tensor], None] = no_listener
        self.balancing_weight = 0.0  # of a sequence's balancing loss in the loss of this rank's micro-batch
        shared = model.shared_expert_intermediate_size > 0
        self.shared_experts = SwiGLU(model, f"{branch}.shared_experts") if shared else None
        self.experts = Experts(model, f"{branch}.experts")

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape (batch, seq, hidden)."""
        of_all = None if self.shared_experts is None else self.shared_experts(hidden)
        tokens = hidden.flatten(0, 1)
        weights, experts = self.route(tokens, len(hidden))
        order = experts.flatten().argsort(stable=True)
        uses = order // experts.shape[1], sorted_places(order).view_as(experts)
        counts = count_tokens(experts, self.config.num_experts)
        self.announce(counts)
        outputs = self.experts(copy_rows(tokens, *uses), weights.flatten()[order], counts)
        routed = sum_rows(outputs, *uses).view_as(hidden)
        return routed if of_all is None else routed + of_all

    def route(self, tokens: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices (tokens, experts per token) of the experts of tokens (tokens, hidden)."""
        of_token = self.config.num_experts_per_tok
        probabilities = self.gate(tokens).softmax(-1)  # type: ignore[operator]
        if self.config.routing == "learned":
            weights, experts = probabilities.topk(of_token)
        else:
            turns = torch.arange(len(tokens) * of_token, device=tokens.device) % self.config.num_experts
            experts = turns.view(-1, of_token)
            weights = probabilities.gather(1, experts)
        if self.balancing_weight:
            slopes = self.balancing_slopes(experts.view(sequences, -1))
            weights = BalancedWeights.apply(weights, probabilities, slopes)  # type: ignore[no-untyped-call]
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(tokens.dtype), experts

    def balancing_slopes(self, experts: Tensor) -> Tensor:
        """Return the derivatives (sequences, experts) of the balancing loss by the probability of a sequence's token.

        `experts` (sequences, choices) has the experts of each sequence. Its loss is the sum over experts of the share
        of choices times the mean probability, times their number, and is 1 where all are chosen as often
        (arXiv 2101.03961; of each sequence by itself as in DeepSeek-V2, arXiv 2405.04434).
        """
        counts = torch.zeros(len(experts), self.config.num_experts, device=experts.device)
        counts.scatter_add_(1, experts, torch.ones_like(experts, dtype=counts.dtype))
        choices = experts.shape[1]
        tokens = choices // self.config.num_experts_per_tok
        return counts * (self.balancing_weight * self.config.num_experts / (choices * tokens))
