"""The one model every strategy trains, of the family asked for."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

from harness.config.schema import ModelConfig
from harness.layout.partition import Stage
from harness.models.dropout_rng import rank_local_rng
from harness.models.loss import loss_function

SequenceChunks = tuple[tuple[int, int], ...]  # (start, stop) of positions

Rotary = tuple[Tensor, Tensor]  # cosines and sines of the positions, each (positions, head_dim)


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads, rotary where given; (batch, seq, hidden) to the same."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.eager = model.attention == "eager"
        self.dropout = model.dropout
        self.dropout_rng_rank: int | None = None  # set where ranks share what comes in and differ in their heads
        query_size = model.num_attention_heads * model.head_dim
        group_size = model.num_key_value_heads * model.head_dim
        biases = model.architecture.biases
        self.q_proj = nn.Linear(model.hidden_size, query_size, bias=biases)
        self.k_proj = nn.Linear(model.hidden_size, group_size, bias=biases)
        self.v_proj = nn.Linear(model.hidden_size, group_size, bias=biases)
        self.o_proj = nn.Linear(query_size, model.hidden_size, bias=biases)

    def forward(self, hidden: Tensor, *rotary: Tensor) -> Tensor:
        # Heads are counted from the projection's width, so that a shard of them works as the whole does.
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary:
            query, key = apply_rotary_emb(query, *rotary), apply_rotary_emb(key, *rotary)
        mixed = self.core(query, key, value)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What lies between the projections: two products and a softmax; (batch, heads, seq, head_dim)."""
        attend = eager_attention if self.eager else flash_attention
        dropout = self.dropout if self.training else 0.0
        with rank_local_rng(self.dropout_rng_rank if dropout else None):
            return attend(query, key, value, dropout)


class SwiGLU(nn.Module):
    """A gate and a value, widened (arXiv 2002.05202), and back."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class GELU(nn.Module):
    """A widening matrix, GELU (arXiv 1606.08415, by tanh as GPT-2 has it), and back."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))  # type: ignore[no-any-return]


MLP_CLASSES: dict[str, type[nn.Module]] = {"llama": SwiGLU, "gpt": GELU}


def build_norm(model: ModelConfig) -> nn.Module:
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
        self.mlp = MLP_CLASSES[model.family](model)

    def forward(self, hidden: Tensor, *rotary: Tensor) -> Tensor:
        hidden = hidden + self.dropout_residual(self.self_attn(self.input_layernorm(hidden), *rotary))
        return hidden + self.dropout_residual(self.mlp(self.post_attention_layernorm(hidden)))

    def dropout_residual(self, joining: Tensor) -> Tensor:
        return F.dropout(joining, self.dropout, self.training)


class Head(nn.Linear):
    """Hidden states (batch, seq, hidden) to logits, or part by part of the tokens to the mean loss.

    The loop over parts is inside the module, so that what wraps it (gathering of its weight, of the sequence) is done
    once for all of them, and no part is cut from tokens of which this rank has only some.
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None, chunks: int = 1) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        parts = zip(hidden.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        return torch.stack([self.chunk_loss(*chunk) for chunk in parts]).mean()

    def chunk_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of some tokens: hidden (tokens, hidden), targets (tokens)."""
        return loss_function(super().forward(hidden).unsqueeze(0), targets)


class Decoder(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab), or to the mean loss where targets are given.

    Parameters are named as in Hugging Face's Llama, whatever the family. A stage of a pipeline has its own layers only,
    under the names they have in the whole, and takes and returns hidden states (batch, seq, hidden) where it is not an
    end.
    """

    def __init__(self, model: ModelConfig, stage: Stage) -> None:
        super().__init__()
        self.config = model
        self.sequence_chunks: SequenceChunks | None = (
            None  # of every sequence, those that this rank has; None: from its beginning
        )
        first, last, kind = stage.holds_embedding, stage.holds_head, model.architecture
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        learned = first and kind.learned_positions
        self.embed_positions = nn.Embedding(model.context_length, model.hidden_size) if learned else None
        self.layers = nn.ModuleDict({str(index): Block(model) for index in stage.layer_indices})
        self.norm = build_norm(model) if last else None
        self.lm_head = Head(model.hidden_size, model.vocab_size, bias=False) if last else None
        self.loss_chunks = 1
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the head's weight the embedding's where the model says so."""
        if self.config.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def layers_by_index(self) -> dict[int, nn.Module]:
        """The decoder layers, by their index in the whole model."""
        return {int(index): block for index, block in self.layers.items()}

    def embedding_and_head_groups(self) -> list[list[nn.Module]]:
        """What turns tokens into hidden states, and hidden states into logits: one list, of both, where tied."""
        first, last = (self.embed_tokens, self.embed_positions), (self.norm, self.lm_head)
        groups = [first + last] if self.config.tie_word_embeddings else [first, last]
        return [[module for module in group if module is not None] for group in groups]

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        chunks = self.sequence_chunks or ((0, hidden.shape[1]),)
        if self.embed_tokens is not None:
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
        assert self.embed_tokens is not None
        hidden: Tensor = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions(chunks, tokens.device))
        return F.dropout(hidden, self.config.dropout, self.training)


def rotary_tables(chunks: SequenceChunks, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Cosines and sines of shape (positions, head_dim), computed in fp32 (rotary embedding, arXiv 2104.09864)."""
    exponents = torch.arange(0, model.head_dim, 2, device=device, dtype=torch.float32) / model.head_dim
    angles = torch.outer(positions(chunks, device).float(), model.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def positions(chunks: SequenceChunks, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in chunks])


def apply_rotary_emb(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (batch, heads, seq, head_dim) turned by their positions, halves paired as Hugging Face pairs them."""
    left, right = heads.chunk(2, dim=-1)
    turned: Tensor = heads * cos + torch.cat((-right, left), dim=-1) * sin
    return turned


def flash_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention by torch's fused kernel; the queries are those of the last positions that the keys have."""
    grouped = query.shape[1] != key.shape[1]
    whole = query.shape[2] == key.shape[2]
    mask = None if whole else causal_mask_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=whole, enable_gqa=grouped)


@functools.cache
def causal_mask_lower_right(queries: int, keys: int) -> CausalBias:
    """Kept, because torch cannot make one while operators are listened to."""
    return causal_lower_right(queries, keys)  # type: ignore[no-any-return]


def eager_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """The same with its scores materialised."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    hidden_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden_future = hidden_future.triu(1 + key.shape[2] - query.shape[2])
    weights = scores.masked_fill(hidden_future, float("-inf")).softmax(-1, dtype=torch.float32)
    mixed: Tensor = F.dropout(weights.to(value.dtype), dropout) @ value
    return mixed
