"""What one micro-batch's pass keeps for backward, tensor by tensor, on one rank. Imports no torch.

After Korthikanti et al. (arXiv 2205.05198), derived anew for the block we run: RMSNorm, grouped heads, a flash kernel,
SwiGLU. Tensor parallelism divides what lies between the matrices of attention and MLP; sequence parallelism also the
norms and the residual stream, but not the norms' outputs: each is gathered for the projections, which keep it whole.
"""

import math
from dataclasses import dataclass

from harness.config import ModelConfig, RunConfig
from harness.layout import Layout
from harness.placement import Stage

FP32_BYTES = 4
INT64_BYTES = 8
WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a dtype by torch's name


@dataclass(frozen=True)
class Pass:
    """One micro-batch on its way through layers, and how tensor parallelism divides its tensors."""

    model: ModelConfig
    sequences: int
    seq_len: int
    compute: str  # torch's dtype name
    device: str = "cpu"
    tp: int = 1
    sequence_parallel: bool = False
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
        return self.sequences * self.seq_len

    @property
    def own_tokens(self) -> int:
        """Tokens of which this rank has the norms and the residual stream."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def hidden_bytes(self) -> int:
        """This rank's part of the residual stream."""
        return self.own_tokens * self.model.hidden_size * self.width


def pass_of(config: RunConfig, layout: Layout, device: str) -> Pass:
    """A micro-batch's pass in a run."""
    train = config.train
    cut = (layout.tp, layout.sequence_parallel, layout.vocabulary_parallel)
    return Pass(config.model, train.micro_batch, train.seq_len, config.precision.compute, device, *cut)


def norm_tensors(name: str, one: Pass) -> dict[str, int]:
    """Bytes that one RMSNorm keeps for backward, and its output, kept by the projections behind it.

    On CPU torch composes the norm of plain operations in fp32, which keep two fp32 copies; on CUDA one kernel keeps
    its input.
    """
    size = one.own_tokens * one.model.hidden_size
    kept = {
        f"{name}.input": size * (FP32_BYTES if one.device == "cpu" else one.width),
        f"{name}.rstd": one.own_tokens * FP32_BYTES,
    }
    if one.device == "cpu":
        kept[f"{name}.normalised"] = size * FP32_BYTES
    return kept | {f"{name}.output": one.tokens * one.model.hidden_size * one.width}


def attention_tensors(one: Pass) -> dict[str, int]:
    """Bytes that attention keeps for backward, its four projections included. The output is the input of o_proj."""
    model = one.model
    size = one.tokens * model.hidden_size * one.width // one.tp
    rows = one.tokens * model.num_attention_heads // one.tp
    if model.attention == "flash":  # arXiv 2205.14135: the scores are never stored
        grouped = size * model.num_key_value_heads // model.num_attention_heads
        return {"query": size, "key": grouped, "value": grouped, "output": size, "logsumexp": rows * FP32_BYTES}
    kept = {"query": size, "key": size, "value": size, "output": size}  # keys and values repeated to every head
    kept |= {"future_mask": one.seq_len**2, "weights_fp32": rows * one.seq_len * FP32_BYTES}
    return kept if one.width == FP32_BYTES else kept | {"weights": rows * one.seq_len * one.width}


def block_tensors(one: Pass) -> dict[str, int]:
    """Bytes of every tensor that one decoder layer keeps for backward, by name."""
    inner = one.tokens * one.model.intermediate_size * one.width // one.tp
    return {
        **norm_tensors("input_layernorm", one),
        **{f"attention.{name}": size for name, size in attention_tensors(one).items()},
        **norm_tensors("post_attention_layernorm", one),
        **{f"mlp.{name}": inner for name in ("gate", "up", "silu", "product")},
    }


def block_backward_bytes(one: Pass) -> int:
    """Gradients of intermediates alive at the worst moment of a layer's backward, beyond what is kept for it.

    At the SwiGLU product: gradients of product, silu and up, less the product freed before, and of the residual. With
    sequence parallelism the residual's is gathered before that: twice there, then beside the product's.
    """
    inner = one.tokens * one.model.intermediate_size * one.width // one.tp
    gathered = one.tokens * one.model.hidden_size * one.width if one.sequence_parallel else 0
    return max(2 * inner, inner + gathered, 2 * gathered) + one.hidden_bytes


def norm_gradient_bytes(one: Pass) -> int:
    """The gradient of a norm's output, as wide as the norm computes."""
    return one.own_tokens * one.model.hidden_size * (FP32_BYTES if one.device == "cpu" else one.width)


def norm_backward_bytes(one: Pass) -> int:
    """Gradients alive at the worst moment of a norm's backward: of output and input, on CPU of three steps between."""
    return (5 if one.device == "cpu" else 2) * norm_gradient_bytes(one)


def deferred_tensors(one: Pass) -> dict[str, int]:
    """Bytes of what a backward for inputs alone leaves for the weights of one layer: gradients of their outputs."""
    whole, inner = (one.tokens * size * one.width for size in (one.model.hidden_size, one.model.intermediate_size))
    grouped = whole * one.model.num_key_value_heads // one.model.num_attention_heads
    columns = {"q_proj": whole, "k_proj": grouped, "v_proj": grouped, "gate_proj": inner, "up_proj": inner}
    rows = dict.fromkeys(("o_proj", "down_proj"), whole)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm_gradient_bytes(one))
    return norms | rows | {name: size // one.tp for name, size in columns.items()}


def scores_tensors(one: Pass) -> dict[str, int]:
    """Bytes of eager attention's scores at the worst moment of its forward, the softmax; none for flash."""
    if one.model.attention == "flash":
        return {}
    elements = one.tokens * one.model.num_attention_heads // one.tp * one.seq_len
    scores = {"scaled": elements * one.width, "masked": elements * one.width, "softmax": elements * FP32_BYTES}
    if one.width < FP32_BYTES and one.device == "cpu":  # on CUDA the softmax kernel widens as it reads
        scores["widened"] = elements * FP32_BYTES
    return scores


def logits_bytes(one: Pass) -> int:
    """This rank's part of the logits in fp32."""
    return one.tokens * math.ceil(one.model.vocab_size / one.vocabulary_tp) * FP32_BYTES


def loss_tensors(one: Pass) -> dict[str, int]:
    """Bytes at the worst moment of logits and cross-entropy, in fp32: backward of the log-softmax.

    torch's loss over logits cut along the vocabulary composes that of plain operations, of which four are alive.
    """
    names = ["log_probabilities", "log_probabilities.gradient", "logits.gradient"]
    return dict.fromkeys(names + ["probabilities"] * (one.vocabulary_tp > 1), logits_bytes(one))


@dataclass(frozen=True)
class Activations:
    """Bytes held for backward by one micro-batch's pass through a stage, logits left out."""

    before_backward: int
    in_last_norm: int  # when backward is in the final norm or the last layer's second, what that scaled freed
    in_last_block: int  # when backward enters the stage's last layer, its recomputed tensors included
    at_last_scores: int  # when that layer computes (or recomputes) its attention
    second_forward: int  # what one layer's adds; 0 without checkpointing


def activations(one: Pass, stage: Stage, checkpointing: str) -> Activations:
    """What a pass through a stage keeps; with full checkpointing the layers' inputs, and one layer's own."""
    block, norm = block_tensors(one), head_tensors(one, stage)
    layers, own, head = layers_bytes(one, stage, checkpointing), sum(block.values()), sum(norm.values())
    attended = ("input_layernorm", "attention.query", "attention.key", "attention.value", "attention.future_mask")
    until_scores = sum(size for name, size in block.items() if name.startswith(attended))
    freed = ("mlp", "post_attention_layernorm.output", "post_attention_layernorm.normalised")
    in_norm = own - sum(size for name, size in block.items() if name.startswith(freed))
    rest = layers - (own if checkpointing == "none" else shared_input(one))
    in_final_norm = layers + head - used_by_weights(norm, one) if stage.holds_head else 0
    in_last_norm = max(in_final_norm, rest + in_norm)
    return Activations(layers + head, in_last_norm, rest + own, rest + until_scores, rest + own - layers)


def weights_alone(one: Pass, stage: Stage, checkpointing: str) -> tuple[int, int]:
    """What is kept when a backward for weights alone enters the last layer, and when it comes to the last matrix.

    It takes them from first to last and frees what their gradients are made of, the rest at its end: with full
    checkpointing all of every layer's second forward.
    """
    block, norm = block_tensors(one), head_tensors(one, stage)
    used, head = used_by_weights(block, one), sum(norm.values())
    again = activations(one, stage, checkpointing).second_forward
    left = layers_bytes(one, stage, checkpointing) + stage.layers * (again - used)
    last = head - used_by_weights(norm, one) + norm["norm.output"] if norm else block["mlp.product"]
    return left + used + head, left + last


def layers_bytes(one: Pass, stage: Stage, checkpointing: str) -> int:
    """What the layers of a stage keep before backward, and what they share."""
    shared = 2 * one.seq_len * one.model.head_dim * one.width  # rotary tables
    if stage.holds_embedding:
        shared += one.tokens * (
            INT64_BYTES + (one.vocabulary_tp > 1)
        )  # token ids, and which of them other ranks look up
    return shared + stage.layers * (sum(block_tensors(one).values()) if checkpointing == "none" else one.hidden_bytes)


def head_tensors(one: Pass, stage: Stage) -> dict[str, int]:
    return norm_tensors("norm", one) if stage.holds_head else {}


def shared_input(one: Pass) -> int:
    """Of a recomputed layer's tensors the bytes that are there already: its norm keeps the input, if no fp32 copy."""
    return one.hidden_bytes if one.width == FP32_BYTES or one.device != "cpu" else 0


def used_by_weights(kept: dict[str, int], one: Pass) -> int:
    """Bytes of what is kept for weights' gradients only: inputs of matrices, and what a norm scales on CPU."""
    ends = ["norm.output", "norm.normalised", "mlp.product"]
    if one.model.attention == "eager":
        ends.append("attention.output")  # the flash kernel keeps it too
    return sum(size for name, size in kept.items() if name.endswith(tuple(ends)))
