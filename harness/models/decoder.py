"""The decoder-only transformer that every strategy trains, in the family `llama`, `gpt` or `moe`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from harness.config.model import ModelConfig
from harness.layout.partition import Stage
from harness.models.dropout_rng import rank_local_rng
from harness.models.mixture import MixtureOfExperts
from harness.models.projections import Projections, SwiGLU

SequenceChunks = tuple[tuple[int, int], ...]  # (start, stop) of positions

Rotary = tuple[Tensor, Tensor]  # cosines and sines of the positions, each (positions, head_dim)


class Attention(Projections):
    """Causal self-attention with grouped-query heads over hidden states (batch, seq, hidden)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, "self_attn")
        self.head_dim = model.head_size
        self.eager = model.attention == "eager"
        self.dropout = model.dropout
        self.dropout_rng_rank: int | None = None  # set where ranks share the input and hold different heads

    def forward(self, hidden: Tensor, *rotary: Tensor) -> Tensor:
        """Return hidden states of the same shape; `rotary` is () or the two tables of rotary_tables."""
        # The number of heads follows from the projection's width, so that this also works on a shard of the heads.
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[operator]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary:
            query, key = apply_rotary_emb(query, *rotary), apply_rotary_emb(key, *rotary)
        output = self.core(query, key, value)
        return self.o_proj(output.transpose(1, 2).flatten(-2))  # type: ignore[operator, no-any-return]

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention between the projections: two products and a softmax of (batch, heads, seq, head_dim)."""
        attend = eager_attention if self.eager else flash_attention
        dropout = self.dropout if self.training else 0.0
        with rank_local_rng(self.dropout_rng_rank if dropout else None):
            return attend(query, key, value, dropout)


class GELU(Projections):
    """An MLP with a widening matrix, GELU (arXiv 1606.08415, approximated by tanh as in GPT-2), and a narrowing one."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))  # type: ignore[operator, no-any-return]


MLP_CLASSES: dict[str, type[Projections]] = {"llama": SwiGLU, "gpt": GELU, "moe": MixtureOfExperts}


def build_norm(model: ModelConfig) -> nn.Module:
    """Return the norm of the model's family over hidden states."""
    if model.architecture.norm == "layer":
        return nn.LayerNorm(model.hidden_size, eps=model.layer_norm_epsilon)
    return nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)


class Block(nn.Module):
    """One decoder layer: the unit that is checkpointed, sharded and placed on a pipeline stage."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.input_layernorm = build_norm(model)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = build_norm(model)
        self.mlp = MLP_CLASSES[model.family](model, "mlp")

    def forward(self, hidden: Tensor, *rotary: Tensor) -> Tensor:
        """Return hidden states of the same shape, after attention and MLP."""
        hidden = hidden + self.dropout_residual(self.self_attn(self.input_layernorm(hidden), *rotary))
        return hidden + self.dropout_residual(self.mlp(self.post_attention_layernorm(hidden)))

    def dropout_residual(self, branch: Tensor) -> Tensor:
        """Apply dropout to a branch before it is added to the residual stream."""
        return F.dropout(branch, self.dropout, self.training)


class Head(nn.Linear):
    """The projection of hidden states (batch, seq, hidden) to logits, or to the mean loss in chunks of the tokens.

    The loop over chunks is inside the module, so that its wrappers (which gather its weight or the sequence) run once
    for all of them, and chunks are taken from the whole sequence even where this rank receives a part of it.
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None, chunks: int = 1) -> Tensor:
        """Return logits (batch, seq, vocab), or the mean loss where targets (batch, seq) are given."""
        if targets is None:
            return super().forward(hidden)
        pairs = zip(hidden.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        return torch.stack([self.chunk_loss(*pair) for pair in pairs]).mean()

    def chunk_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of some tokens: hidden (tokens, hidden), targets (tokens)."""
        return loss_function(super().forward(hidden).unsqueeze(0), targets)


class Decoder(nn.Module):
    """The model, or one stage of it: token ids (batch, seq) to logits (batch, seq, vocab) or to the mean loss.

    Parameters are named as in Hugging Face's Llama, whatever the family. A pipeline stage has its own layers only,
    under their names in the whole model. It takes hidden states (batch, seq, hidden) unless it holds the embedding,
    and returns them unless it holds the head.
    """

    def __init__(self, model: ModelConfig, stage: Stage) -> None:
        super().__init__()
        self.config = model
        # The chunks of every sequence that this rank has; None where it has whole sequences.
        self.sequence_chunks: SequenceChunks | None = None
        first, last = stage.holds_embedding, stage.holds_head
        self.holds_embedding = first
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        has_positions = first and model.architecture.learned_positions
        self.embed_positions = nn.Embedding(model.context_length, model.hidden_size) if has_positions else None
        self.layers = nn.ModuleDict({str(index): Block(model) for index in stage.layer_indices})
        self.norm = build_norm(model) if last else None
        if last and not first and model.tie_word_embeddings:  # a copy, of which only the head makes use
            self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.lm_head = Head(model.hidden_size, model.vocab_size, bias=False) if last else None
        self.loss_chunks = 1
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's weight with the head if model.tie_word_embeddings is true."""
        if self.config.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def layers_by_index(self) -> dict[int, nn.Module]:
        """Return this stage's decoder layers by their index in the whole model."""
        return {int(index): block for index, block in self.layers.items()}

    def listen_to_routers(self, listener: Callable[[int, Tensor], None]) -> None:
        """Call a listener in each forward of a layer with its index and the number of tokens of each expert."""
        for index, block in self.layers_by_index().items():
            mixture: Any = block.get_submodule("mlp")
            mixture.announce = partial(listener, index)

    def balance_experts(self, weight: float) -> None:
        """Add a loss for unequal loads of experts to the gradients of the routers.

        `weight` is that of each sequence in the loss of which a micro-batch's backward computes the gradients.
        """
        for block in self.layers_by_index().values():
            mixture: Any = block.get_submodule("mlp")
            mixture.balancing_weight = weight

    def embedding_and_head_groups(self) -> list[list[nn.Module]]:
        """Return the modules before the layers and those behind them, as two lists or as one where weights are tied."""
        first, last = (self.embed_tokens, self.embed_positions), (self.norm, self.lm_head)
        groups = [first + last] if self.config.tie_word_embeddings else [first, last]
        return [[module for module in group if module is not None] for group in groups]

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return hidden states, logits, or the mean loss where targets are given; `hidden` may be token ids."""
        chunks = self.sequence_chunks or ((0, hidden.shape[1]),)
        if self.holds_embedding:
            hidden = self.embed(hidden, chunks)
        learned = self.config.architecture.learned_positions
        rotary = () if learned else rotary_tables(chunks, self.config, hidden.device, hidden.dtype)
        for layer in self.layers.values():
            hidden = layer(hidden, *rotary)
        if self.norm is None or self.lm_head is None:
            return hidden
        if targets is not None and self.loss_chunks > 1:
            return self.lm_head(self.norm(hidden), targets=targets, chunks=self.loss_chunks)  # type: ignore[no-any-return]
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits if targets is None else loss_function(logits, targets)

    def embed(self, tokens: Tensor, chunks: SequenceChunks) -> Tensor:
        """Return the hidden states (batch, seq, hidden) of token ids (batch, seq)."""
        assert self.embed_tokens is not None
        hidden: Tensor = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions(chunks, tokens.device))
        if self.config.adapter.is_enabled:
            hidden.requires_grad_()  # behind frozen tables: the first layer's backward is then that of all others
        return F.dropout(hidden, self.config.dropout, self.training)


def rotary_tables(chunks: SequenceChunks, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Return cosines and sines (positions, head_dim), computed in fp32 (rotary embedding, arXiv 2104.09864)."""
    exponents = torch.arange(0, model.head_size, 2, device=device, dtype=torch.float32) / model.head_size
    angles = torch.outer(positions(chunks, device).float(), model.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def positions(chunks: SequenceChunks, device: torch.device) -> Tensor:
    """Return the positions that the chunks hold, one after another."""
    return torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])


def apply_rotary_emb(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads (batch, heads, seq, head_dim) rotated by their positions; halves are paired as in Hugging Face."""
    left, right = heads.chunk(2, dim=-1)
    rotated: Tensor = heads * cos + torch.cat((-right, left), dim=-1) * sin
    return rotated


def flash_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute causal attention by torch's fused kernel; the queries belong to the last positions of the keys."""
    if repeats_grouped_heads(query):
        key, value = repeat_heads(key, query), repeat_heads(value, query)
    is_grouped = query.shape[1] != key.shape[1]
    is_square = query.shape[2] == key.shape[2]
    mask = None if is_square else causal_mask_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=is_square, enable_gqa=is_grouped)


def repeats_grouped_heads(heads: Tensor) -> bool:
    """Return whether grouped keys must be repeated, because no fused kernel of the device takes them as they are.

    On CUDA that is the case in fp32: flash and cuDNN attention take 16 bit only, and the memory-efficient kernel takes
    as many keys' heads as queries' heads. With grouped heads torch would materialize the scores there.
    """
    return heads.device.type == "cuda" and heads.dtype == torch.float32


def repeat_heads(heads: Tensor, query: Tensor) -> Tensor:
    """Return keys or values (batch, heads, seq, head_dim) with every head repeated for the query's heads of its group.

    They are returned as they are if the query has as many heads.
    """
    repeats = query.shape[1] // heads.shape[1]
    return heads.repeat_interleave(repeats, dim=1) if repeats > 1 else heads


_causal_masks: dict[tuple[int, int], CausalBias] = {}  # by the numbers of queries and keys


def causal_mask_lower_right(queries: int, keys: int) -> CausalBias:
    """Return torch's causal mask, and keep it: torch cannot create one under a dispatch mode.

    Nor can its compiler trace its construction. It would cut a layer into functions that all layers share, and compile
    each of them once more for every number of keys, even in later steps. functools.cache is no remedy, because the
    compiler ignores it.

    The mask has no elements: attention reads its variant and its two numbers only. torch's own causal_lower_right
    allocates 2 x queries x keys elements in fp32, because CausalBias has no __new__, and Tensor's takes the variant's
    number for a size.
    """
    mask = _causal_masks.get((queries, keys))
    if mask is None:
        mask = _causal_masks[queries, keys] = torch.empty(0, device="cpu").as_subclass(CausalBias)
        CausalBias.__init__(mask, CausalVariant.LOWER_RIGHT, queries, keys)
    return mask


def eager_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute the same as flash_attention with the scores materialized."""
    key, value = repeat_heads(key, query), repeat_heads(value, query)
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    is_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    is_future = is_future.triu(1 + key.shape[2] - query.shape[2])
    weights = scores.masked_fill(is_future, float("-inf")).softmax(-1, dtype=torch.float32)
    output: Tensor = F.dropout(weights.to(value.dtype), dropout) @ value
    return output


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the tokens, in fp32; logits (batch, seq, vocab), targets (batch, seq)."""
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_of(module: nn.Module, inputs: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """Return a wrapped or plain model's mean loss over a micro-batch; with `chunks` the model computes it in parts."""
    loss: Tensor = module(inputs, targets) if chunks > 1 else loss_function(module(inputs), targets)
    return loss
