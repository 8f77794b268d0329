"""An MLP that is a mixture of experts."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config.model import ModelConfig
from harness.models.grouped import copy_rows, count_tokens, sorted_places, sum_rows
from harness.models.projections import Projections, SwiGLU


def no_listener(counts: Tensor) -> None:
    """Notice nothing."""


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
        shared = model.shared_expert_intermediate_size > 0
        self.shared_experts = SwiGLU(model, f"{branch}.shared_experts") if shared else None
        self.experts = Experts(model, f"{branch}.experts")

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape (batch, seq, hidden)."""
        of_all = None if self.shared_experts is None else self.shared_experts(hidden)
        tokens = hidden.flatten(0, 1)
        weights, experts = self.route(tokens)
        order = experts.flatten().argsort(stable=True)
        uses = order // experts.shape[1], sorted_places(order).view_as(experts)
        counts = count_tokens(experts, self.config.num_experts)
        self.announce(counts)
        outputs = self.experts(copy_rows(tokens, *uses), weights.flatten()[order], counts)
        routed = sum_rows(outputs, *uses).view_as(hidden)
        return routed if of_all is None else routed + of_all

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices (tokens, experts per token) of the experts of tokens (tokens, hidden)."""
        of_token = self.config.num_experts_per_tok
        probabilities = self.gate(tokens).softmax(-1)  # type: ignore[operator]
        if self.config.routing == "learned":
            weights, experts = probabilities.topk(of_token)
        else:
            turns = torch.arange(len(tokens) * of_token, device=tokens.device) % self.config.num_experts
            experts = turns.view(-1, of_token)
            weights = probabilities.gather(1, experts)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(tokens.dtype), experts
