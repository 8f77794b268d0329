"""The one model every strategy trains: a llama-family decoder, and initial weights that no layout can change."""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.config import ModelConfig
from harness.placement import Stage, whole


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads and rotary positions; (batch, seq, hidden) to the same."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.eager = model.attention == "eager"
        query_size = model.num_attention_heads * model.head_dim
        group_size = model.num_key_value_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, group_size, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, group_size, bias=False)
        self.o_proj = nn.Linear(query_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Heads are counted from the projection's width, so that a shard of them works as the whole does.
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.eager:
            mixed = eager_attention(query, key, value)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer: the unit that is checkpointed, sharded and placed on a pipeline stage."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.mlp = MLP(model)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab), or to the mean loss where targets are given.

    Parameters are named as in Hugging Face's Llama. A stage of a pipeline has its own layers only, under the names
    they have in the whole, and takes and returns hidden states (batch, seq, hidden) where it is not an end.
    """

    def __init__(self, model: ModelConfig, stage: Stage) -> None:
        super().__init__()
        self.config = model
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if stage.holds_embedding else None
        self.layers = nn.ModuleDict({str(index): Block(model) for index in stage.layer_indices})
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps) if stage.holds_head else None
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if stage.holds_head else None
        self.tie()

    def tie(self) -> None:
        """Makes the head's weight the embedding's where the model says so."""
        if self.config.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        seq_len = hidden.shape[1]
        if self.embed_tokens is not None:
            hidden = self.embed_tokens(hidden)
        cos, sin = rotary_tables(seq_len, self.config, hidden.device, hidden.dtype)
        for layer in self.layers.values():
            hidden = layer(hidden, cos, sin)
        if self.norm is None or self.lm_head is None:
            return hidden
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits if targets is None else loss_function(logits, targets)


def rotary_tables(seq_len: int, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (seq_len, head_dim), computed in fp32 (rotary embedding, arXiv 2104.09864)."""
    exponents = torch.arange(0, model.head_dim, 2, device=device, dtype=torch.float32) / model.head_dim
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, model.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (batch, heads, seq, head_dim) turned by their positions, halves paired as Hugging Face pairs them."""
    left, right = heads.chunk(2, dim=-1)
    turned: Tensor = heads * cos + torch.cat((-right, left), dim=-1) * sin
    return turned


def eager_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention with its scores materialised; shapes as in scaled_dot_product_attention."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    hidden_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(hidden_future, float("-inf")).softmax(-1, dtype=torch.float32)
    mixed: Tensor = weights.to(value.dtype) @ value
    return mixed


def build_model(model: ModelConfig, stage: Stage | None = None) -> Llama:
    """The model, or a stage of it, without memory: its weights come from initial_value."""
    with torch.device("meta"):
        return Llama(model, stage or whole(model))


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens, in fp32; logits (batch, seq, vocab), targets (batch, seq)."""
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def generator(seed: int, purpose: str, device: torch.device) -> torch.Generator:
    """Random numbers that follow from the seed and a purpose alone."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(name: str, shape: torch.Size, model: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """The whole fp32 tensor a parameter starts from: a function of seed, name and shape, never of the layout."""
    if "norm" in name.rsplit(".", 2)[-2]:
        return torch.ones(shape, device=device)
    value = torch.empty(shape, device=device)
    return value.normal_(0.0, model.initializer_range, generator=generator(seed, name, device))


def materialise(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    kept: torch.device | None = None,
) -> None:
    """Fills a model built on the meta device, sharded or not, holding one whole parameter at a time.

    Values are made on `device`, as every layout makes them, and kept there or on `kept`.

    Tensors are swapped in place, so that tied weights stay tied and a wrapper's references stay true.
    """
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:  # an engine's own layers have theirs
            continue
        whole = initial_value(name, parameter.shape, config, seed, device)
        filled = nn.Parameter(part_like(parameter, whole.to(dtype)).to(kept or device))
        torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]


def part_like(template: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut without communication as the template is."""
    if not isinstance(template, DTensor):
        return whole
    box = local_box(template)
    local = whole[tuple(slice(start, stop) for start, stop in box)].clone()
    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def local_box(tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """The (start, stop) that this rank holds along every dimension of the whole tensor."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((start, start + size) for size, start in zip(sizes, offsets, strict=True))
