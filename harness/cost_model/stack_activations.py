"""The tensors that a decoder layer, head and loss keep under another implementation. Imports no torch.

The terms are those of Korthikanti et al. (arXiv 2205.05198, section 4.1): two norms, four projections of attention, an
MLP and the dropout masks, as harness.cost_model.activations has them for this project's own layers.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.stack_memory import StackMemory

FP32_BYTES = 4


@dataclass(frozen=True)
class PassShape:
    """One micro-batch on one rank, and how tensor and context parallelism divide it."""

    model: ModelConfig
    tokens: int  # of this rank's part of the sequences
    seq_len: int  # of a whole sequence
    width: int  # bytes per element in compute
    tp: int
    vocabulary_tp: int
    sequence_parallel: bool

    @property
    def residual_tokens(self) -> int:
        """The tokens whose norms and residual stream this rank computes."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def hidden_bytes(self) -> int:
        """The bytes of this rank's part of the residual stream."""
        return self.residual_tokens * self.model.hidden_size * self.width

    @property
    def whole_hidden_bytes(self) -> int:
        """The bytes of the residual stream that matrices take, gathered where it is divided."""
        return self.tokens * self.model.hidden_size * self.width

    @property
    def inner_bytes(self) -> int:
        """The bytes of one tensor of the MLP's inner size."""
        return self.tokens * self.model.intermediate_size * self.width // self.tp


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of one layer's tensors for one micro-batch."""

    saved: int  # for backward
    scores: int  # of these, what eager attention keeps of its scores
    backward: int  # gradients of intermediates at the worst moment of backward


@lru_cache(maxsize=4096)
def layer_bytes(shape: PassShape, memory: StackMemory) -> LayerBytes:
    """Return what a layer keeps for backward and what its backward adds at its worst moment."""
    model = shape.model
    norms = sum(norm_bytes(shape, memory).values()) * 2
    heads = sum(attention_bytes(shape, memory).values())
    scores = score_bytes(shape, memory)
    gated = len(model.architecture.widening) > 1
    inner = shape.inner_bytes * (memory.gated_mlp_tensors if gated else memory.plain_mlp_tensors)
    masks = 2 * shape.residual_tokens * model.hidden_size if model.dropout else 0
    # The gradient of the MLP's output, gathered where it is divided, and of the tensors between its matrices.
    backward = shape.hidden_bytes + shape.inner_bytes * (2 if gated else 1)
    backward += shape.whole_hidden_bytes if shape.sequence_parallel and shape.tp > 1 else 0
    return LayerBytes(norms + heads + scores + inner + masks, scores, backward)


def norm_bytes(shape: PassShape, memory: StackMemory) -> dict[str, int]:
    """Return the bytes that one norm keeps: its input, statistics in fp32 and its output, which matrices take."""
    is_rms = shape.model.architecture.norm == "rms"
    statistics = 1 if is_rms else 2
    return {
        "input": shape.hidden_bytes,
        "copies": shape.hidden_bytes * memory.rms_norm_copies if is_rms else 0,
        "statistics": shape.residual_tokens * FP32_BYTES * statistics,
        "output": shape.hidden_bytes if memory.gathers_inputs_again else shape.whole_hidden_bytes,
    }


def attention_bytes(shape: PassShape, memory: StackMemory) -> dict[str, int]:
    """Return the bytes that attention keeps outside its scores."""
    model = shape.model
    query = shape.tokens * model.head_dim * model.num_attention_heads * shape.width // shape.tp
    keys = query * model.num_key_value_heads // model.num_attention_heads
    tensors = {"query": query, "key": keys, "value": keys, "output": query, "copies": memory.attention_copies * query}
    if model.attention == "flash":
        tensors["logsumexp"] = shape.tokens * model.num_attention_heads * FP32_BYTES // shape.tp
    return tensors


def score_bytes(shape: PassShape, memory: StackMemory) -> int:
    """Return the bytes that eager attention keeps of its scores: softmax, and with dropout its mask and result."""
    if shape.model.attention != "eager":
        return 0
    elements = shape.tokens * shape.seq_len * shape.model.num_attention_heads // shape.tp
    return elements * (memory.scores_bytes + (1 + shape.width if shape.model.dropout else 0))


def head_bytes(shape: PassShape, memory: StackMemory) -> int:
    """Return the bytes that the final norm keeps for the head."""
    return sum(norm_bytes(shape, memory).values())


def loss_bytes(shape: PassShape, memory: StackMemory) -> int:
    """Return the bytes of logits at the worst moment of the loss."""
    tokens = min(shape.tokens, memory.loss_chunk_tokens or shape.tokens)
    rows = math.ceil(shape.model.vocab_size / (memory.vocabulary_multiple * shape.vocabulary_tp))
    elements = tokens * rows * memory.vocabulary_multiple
    return elements * (memory.fp32_logits * FP32_BYTES + memory.narrow_logits * shape.width)
