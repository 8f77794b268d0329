"""What one micro-batch's pass keeps for backward, tensor by tensor, on one rank. Imports no torch.

After Korthikanti et al. (arXiv 2205.05198), derived anew for the blocks we run: RMSNorm or LayerNorm, grouped heads, a
flash kernel, SwiGLU or GELU. Tensor parallelism divides what lies between the matrices of attention and MLP; sequence
parallelism also the norms and the residual stream, but not the norms' outputs: each is gathered for the projections,
which keep it whole.

The paper's GPT layer keeps sbh(34 + 5as/h) bytes in 16 bit with eager attention and dropout. Ours keeps on CUDA
34sbh + 7as²b + 16sb + s²: the softmax is made and kept in fp32 (4as²b, not 2), and kept are the norms' statistics
(a mean and a reciprocal root in fp32 each) and the mask of the future. On CPU a dropout's mask is as wide as what it
drops, not a byte: 36sbh + 8as²b + 8sb + s². The flash kernel keeps 34sbh + 4asb + 16sb on CUDA; on CPU there is none
with dropout: scaled_dot_product_attention composes it in fp32, which keeps 42sbh + 12as²b + 8sb.
"""

import math
from dataclasses import dataclass

from harness.config.schema import ModelConfig, RunConfig
from harness.layout.layout import Layout

FP32_BYTES = 4

INT64_BYTES = 8

WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a dtype by torch's name


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch on its way through layers, and how tensor parallelism divides its tensors."""

    model: ModelConfig
    sequences: int
    seq_len: int
    compute: str  # torch's dtype name
    device: str = "cpu"
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    loss_chunks: int = 1
    vocabulary_parallel: bool = True

    @property
    def vocabulary_tp(self) -> int:
        """Into how many parts embedding and head are cut."""
        return self.tp if self.vocabulary_parallel else 1

    @property
    def width(self) -> int:
        """Bytes an element."""
        return WIDTH_BYTES[self.compute]

    @property
    def tokens(self) -> int:
        """Of this rank's part of the sequences."""
        return self.sequences * self.seq_len // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens of which this rank has the norms and the residual stream."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def hidden_bytes(self) -> int:
        """This rank's part of the residual stream."""
        return self.own_tokens * self.model.hidden_size * self.width


def micro_batch_shape(config: RunConfig, layout: Layout, device: str) -> MicroBatchShape:
    """A micro-batch's pass in a run."""
    train = config.train
    cut = (layout.tp, layout.sequence_parallel, layout.cp, train.loss_chunks, layout.vocabulary_parallel)
    return MicroBatchShape(config.model, train.micro_batch, train.seq_len, config.precision.compute, device, *cut)


def norm_tensors(name: str, one: MicroBatchShape) -> dict[str, int]:
    """Bytes that one norm keeps for backward, and its output, kept by the projections behind it.

    On CPU torch composes RMSNorm of plain operations in fp32, which keep two fp32 copies. On CUDA, and of LayerNorm
    everywhere, one kernel keeps its input; the statistics are fp32, of a CPU's LayerNorm as wide as its input.
    """
    composed, statistic = norm_is_decomposed(one), FP32_BYTES
    if one.device == "cpu" and not composed:
        statistic = one.width
    size = one.own_tokens * one.model.hidden_size
    kept = {
        f"{name}.input": size * (FP32_BYTES if composed else one.width),
        f"{name}.rstd": one.own_tokens * statistic,
    }
    if one.model.architecture.norm == "layer":
        kept[f"{name}.mean"] = one.own_tokens * statistic
    if composed:
        kept[f"{name}.normalised"] = size * FP32_BYTES
    return kept | {f"{name}.output": one.tokens * one.model.hidden_size * one.width}


def norm_is_decomposed(one: MicroBatchShape) -> bool:
    """Whether torch makes the norm of plain operations in fp32."""
    return one.device == "cpu" and one.model.architecture.norm == "rms"


def mask_width(one: MicroBatchShape) -> int:
    """Bytes an element of a dropout's mask: a CPU multiplies by it in the width of compute."""
    return one.width if one.device == "cpu" else 1


def masks(one: MicroBatchShape, *names: str) -> dict[str, int]:
    """Bytes of the dropout masks of the residual stream; none without dropout."""
    size = one.own_tokens * one.model.hidden_size * mask_width(one)
    return dict.fromkeys(names, size) if one.model.dropout else {}


def attention_is_decomposed(one: MicroBatchShape) -> bool:
    """Whether scaled_dot_product_attention has no fused kernel: a CPU's takes no dropout, and it is made in fp32."""
    return one.model.attention == "flash" and one.device == "cpu" and one.model.dropout > 0


def attention_tensors(one: MicroBatchShape) -> dict[str, int]:
    """Bytes that attention keeps for backward, its four projections included. The output is the input of o_proj."""
    model = one.model
    size = one.tokens * model.hidden_size * one.width // one.tp
    rows = one.tokens * model.num_attention_heads // one.tp
    if one.cp > 1:
        return context_tensors(one, size, rows)
    if attention_is_decomposed(one):
        wide = size * FP32_BYTES // one.width
        scores = dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), rows * one.seq_len * FP32_BYTES)
        return {"query": wide, "key": wide, "value": wide, "output": size} | scores
    if model.attention == "flash":  # arXiv 2205.14135: the scores are never stored
        grouped = size * model.num_key_value_heads // model.num_attention_heads
        return {"query": size, "key": grouped, "value": grouped, "output": size, "logsumexp": rows * FP32_BYTES}
    kept = {"query": size, "key": size, "value": size, "output": size}  # keys and values repeated to every head
    kept |= {"future_mask": one.seq_len**2, "weights_fp32": rows * one.seq_len * FP32_BYTES}
    if model.dropout:
        return kept | {
            "weights_mask": rows * one.seq_len * mask_width(one),
            "dropped": rows * one.seq_len * one.width,
        }
    return kept if one.width == FP32_BYTES else kept | {"weights": rows * one.seq_len * one.width}


def context_tensors(one: MicroBatchShape, size: int, rows: int) -> dict[str, int]:
    """The same where a rank has two chunks of every sequence, and gathers keys and values of all of it.

    The chunks see (2 cp + 1) / (4 cp) of the scores together. The fused kernel keeps the chunks' outputs beside what
    o_proj takes; on a CPU it takes a mask as wide as the scores of one head and sequence.
    """
    model, seen = one.model, 2 * one.cp + 1  # in chunks of keys
    whole = size * one.cp * model.num_key_value_heads // model.num_attention_heads
    chunk = one.seq_len // (2 * one.cp)
    grouped = model.num_key_value_heads < model.num_attention_heads
    repeated = size * seen // 2  # keys of every chunk seen, for every head
    scores = rows * seen * chunk // 2
    if attention_is_decomposed(one):
        width = FP32_BYTES // one.width
        kept = {"query": size * width, "key": repeated * width, "value": whole * width, "output": size}
        return kept | dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), scores * FP32_BYTES)
    if model.attention == "flash":
        kept = {"query": size, "key": whole, "value": whole, "output": size, "chunks": size}
        mask = seen * chunk**2 * one.width if one.device == "cpu" else 0
        return kept | {"logsumexp": rows * FP32_BYTES, "future_mask": mask}
    seen_keys = repeated if grouped else whole  # heads that need no repeating are seen where they were gathered
    kept = {"query": size, "key": seen_keys, "value": seen_keys, "output": size, "future_mask": seen * chunk**2}
    kept["weights_fp32"] = scores * FP32_BYTES
    if model.dropout:
        return kept | {"weights_mask": scores * mask_width(one), "dropped": scores * one.width}
    return kept if one.width == FP32_BYTES else kept | {"weights": scores * one.width}


def block_tensors(one: MicroBatchShape) -> dict[str, int]:
    """Bytes of every tensor that one decoder layer keeps for backward, by name."""
    inner = one.tokens * one.model.intermediate_size * one.width // one.tp
    return {
        **norm_tensors("input_layernorm", one),
        **{f"attention.{name}": size for name, size in attention_tensors(one).items()},
        **masks(one, "attention.mask"),
        **norm_tensors("post_attention_layernorm", one),
        **{f"mlp.{name}": inner for name in one.model.architecture.mlp_keeps},
        **masks(one, "mlp.mask"),
    }


def block_backward_bytes(one: MicroBatchShape) -> int:
    """Gradients of intermediates alive at the worst moment of a layer's backward, beyond what is kept for it.

    At the SwiGLU product: gradients of product, silu and up, less the product freed before, and of the residual; a
    family says how many there are of the inner width. With sequence parallelism the residual's is gathered before that:
    twice there, then beside the product's.
    """
    inner = one.tokens * one.model.intermediate_size * one.width // one.tp
    gathered = one.tokens * one.model.hidden_size * one.width if one.sequence_parallel else 0
    matrix = one.model.hidden_size * one.model.intermediate_size * one.width // one.tp
    tensors, matrices = one.model.architecture.mlp_backward
    return max(tensors * inner + matrices * matrix, inner + gathered, 2 * gathered) + one.hidden_bytes


def recompute_allreduce_bytes(one: MicroBatchShape) -> int:
    """Beyond what it keeps, at the end of a second forward in which tensor-parallel ranks sum what is dropped from.

    The gradient that waits, the summand and three copies of the sum, as DTensor passes it on; no mask as yet.
    """
    if one.tp == 1 or not one.model.dropout:
        return 0
    return one.tokens * one.model.hidden_size * one.width + 4 * one.hidden_bytes - sum(masks(one, "mask").values())


def norm_gradient_bytes(one: MicroBatchShape) -> int:
    """The gradient of a norm's output, as wide as the norm computes."""
    return one.own_tokens * one.model.hidden_size * (FP32_BYTES if norm_is_decomposed(one) else one.width)


def norm_backward_bytes(one: MicroBatchShape) -> int:
    """Gradients alive at the worst moment of a norm's backward: of output and input, on CPU of three steps between."""
    return (5 if norm_is_decomposed(one) else 2) * norm_gradient_bytes(one)


def deferred_weight_grad_inputs(one: MicroBatchShape) -> dict[str, int]:
    """Bytes of what a backward for inputs alone leaves for the weights of one layer: gradients of their outputs."""
    whole, inner = (one.tokens * size * one.width for size in (one.model.hidden_size, one.model.intermediate_size))
    grouped = whole * one.model.num_key_value_heads // one.model.num_attention_heads
    columns = {"q_proj": whole, "k_proj": grouped, "v_proj": grouped} | dict.fromkeys(
        one.model.architecture.widening, inner
    )
    rows = dict.fromkeys(("o_proj", "down_proj"), whole)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm_gradient_bytes(one))
    return norms | rows | {name: size // one.tp for name, size in columns.items()}


def eager_score_tensors(one: MicroBatchShape) -> dict[str, int]:
    """Bytes of eager attention's scores at the worst moment of its forward, the softmax; none for flash."""
    elements = one.tokens * one.model.num_attention_heads // one.tp * one.seq_len
    if attention_is_decomposed(one):
        return dict.fromkeys(("scores", "softmax", "mask", "dropped"), elements * FP32_BYTES)
    if one.model.attention == "flash":
        return {}
    if one.cp > 1:  # one chunk of two at a time
        elements //= 2
    scores = {"scaled": elements * one.width, "masked": elements * one.width, "softmax": elements * FP32_BYTES}
    if one.width < FP32_BYTES and one.device == "cpu":  # on CUDA the softmax kernel widens as it reads
        scores["widened"] = elements * FP32_BYTES
    if not one.model.dropout:
        return scores
    narrowed = elements * one.width if one.width < FP32_BYTES else 0
    dropping = {"scaled": elements * one.width, "softmax": elements * FP32_BYTES, "narrowed": narrowed}
    dropping |= {"mask": elements * mask_width(one), "dropped": elements * one.width}
    return max(scores, dropping, key=lambda alive: sum(alive.values()))


def logits_bytes(one: MicroBatchShape) -> int:
    """This rank's part of the logits in fp32, of as many tokens as go through the loss at once."""
    return one.tokens // one.loss_chunks * math.ceil(one.model.vocab_size / one.vocabulary_tp) * FP32_BYTES


def loss_tensors(one: MicroBatchShape) -> dict[str, int]:
    """Bytes at the worst moment of logits and cross-entropy, in fp32: backward of the log-softmax.

    torch's loss over logits cut along the vocabulary composes that of plain operations, of which four are alive.
    """
    names = ["log_probabilities", "log_probabilities.gradient", "logits.gradient"]
    return dict.fromkeys(names + ["probabilities"] * (one.vocabulary_tp > 1), logits_bytes(one))
