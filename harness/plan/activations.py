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

from harness.config import CheckpointingConfig, ModelConfig, RunConfig
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


def pass_of(config: RunConfig, layout: Layout, device: str) -> Pass:
    """A micro-batch's pass in a run."""
    train = config.train
    cut = (layout.tp, layout.sequence_parallel, layout.cp, train.loss_chunks, layout.vocabulary_parallel)
    return Pass(config.model, train.micro_batch, train.seq_len, config.precision.compute, device, *cut)


def norm_tensors(name: str, one: Pass) -> dict[str, int]:
    """Bytes that one norm keeps for backward, and its output, kept by the projections behind it.

    On CPU torch composes RMSNorm of plain operations in fp32, which keep two fp32 copies. On CUDA, and of LayerNorm
    everywhere, one kernel keeps its input; the statistics are fp32, of a CPU's LayerNorm as wide as its input.
    """
    composed, statistic = composes_norm(one), FP32_BYTES
    if one.device == "cpu" and not composed:
        statistic = one.width
    size = one.own_tokens * one.model.hidden_size
    kept = {
        f"{name}.input": size * (FP32_BYTES if composed else one.width),
        f"{name}.rstd": one.own_tokens * statistic,
    }
    if one.model.kind.norm == "layer":
        kept[f"{name}.mean"] = one.own_tokens * statistic
    if composed:
        kept[f"{name}.normalised"] = size * FP32_BYTES
    return kept | {f"{name}.output": one.tokens * one.model.hidden_size * one.width}


def composes_norm(one: Pass) -> bool:
    """Whether torch makes the norm of plain operations in fp32."""
    return one.device == "cpu" and one.model.kind.norm == "rms"


def mask_width(one: Pass) -> int:
    """Bytes an element of a dropout's mask: a CPU multiplies by it in the width of compute."""
    return one.width if one.device == "cpu" else 1


def masks(one: Pass, *names: str) -> dict[str, int]:
    """Bytes of the dropout masks of the residual stream; none without dropout."""
    size = one.own_tokens * one.model.hidden_size * mask_width(one)
    return dict.fromkeys(names, size) if one.model.dropout else {}


def composes_attention(one: Pass) -> bool:
    """Whether scaled_dot_product_attention has no fused kernel: a CPU's takes no dropout, and it is made in fp32."""
    return one.model.attention == "flash" and one.device == "cpu" and one.model.dropout > 0


def attention_tensors(one: Pass) -> dict[str, int]:
    """Bytes that attention keeps for backward, its four projections included. The output is the input of o_proj."""
    model = one.model
    size = one.tokens * model.hidden_size * one.width // one.tp
    rows = one.tokens * model.num_attention_heads // one.tp
    if one.cp > 1:
        return context_tensors(one, size, rows)
    if composes_attention(one):
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


def context_tensors(one: Pass, size: int, rows: int) -> dict[str, int]:
    """The same where a rank has two chunks of every sequence, and gathers keys and values of all of it.

    The chunks see (2 cp + 1) / (4 cp) of the scores together. The fused kernel keeps the chunks' outputs beside what
    o_proj takes; on a CPU it takes a mask as wide as the scores of one head and sequence.
    """
    model, seen = one.model, 2 * one.cp + 1  # in chunks of keys
    whole = size * one.cp * model.num_key_value_heads // model.num_attention_heads
    chunk = one.seq_len // (2 * one.cp)
    repeated = size * seen // 2  # keys of every chunk seen, for every head
    scores = rows * seen * chunk // 2
    if composes_attention(one):
        width = FP32_BYTES // one.width
        kept = {"query": size * width, "key": repeated * width, "value": whole * width, "output": size}
        return kept | dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), scores * FP32_BYTES)
    if model.attention == "flash":
        kept = {"query": size, "key": whole, "value": whole, "output": size, "chunks": size}
        mask = seen * chunk**2 * one.width if one.device == "cpu" else 0
        return kept | {"logsumexp": rows * FP32_BYTES, "future_mask": mask}
    kept = {"query": size, "key": repeated, "value": repeated, "output": size, "future_mask": seen * chunk**2}
    kept["weights_fp32"] = scores * FP32_BYTES
    if model.dropout:
        return kept | {"weights_mask": scores * mask_width(one), "dropped": scores * one.width}
    return kept if one.width == FP32_BYTES else kept | {"weights": scores * one.width}


def block_tensors(one: Pass) -> dict[str, int]:
    """Bytes of every tensor that one decoder layer keeps for backward, by name."""
    inner = one.tokens * one.model.intermediate_size * one.width // one.tp
    return {
        **norm_tensors("input_layernorm", one),
        **{f"attention.{name}": size for name, size in attention_tensors(one).items()},
        **masks(one, "attention.mask"),
        **norm_tensors("post_attention_layernorm", one),
        **{f"mlp.{name}": inner for name in one.model.kind.mlp_keeps},
        **masks(one, "mlp.mask"),
    }


def block_backward_bytes(one: Pass) -> int:
    """Gradients of intermediates alive at the worst moment of a layer's backward, beyond what is kept for it.

    At the SwiGLU product: gradients of product, silu and up, less the product freed before, and of the residual; a
    family says how many there are of the inner width. With sequence parallelism the residual's is gathered before that:
    twice there, then beside the product's.
    """
    inner = one.tokens * one.model.intermediate_size * one.width // one.tp
    gathered = one.tokens * one.model.hidden_size * one.width if one.sequence_parallel else 0
    matrix = one.model.hidden_size * one.model.intermediate_size * one.width // one.tp
    tensors, matrices = one.model.kind.mlp_backward
    return max(tensors * inner + matrices * matrix, inner + gathered, 2 * gathered) + one.hidden_bytes


def second_sum_bytes(one: Pass) -> int:
    """Beyond what it keeps, at the end of a second forward in which tensor-parallel ranks sum what is dropped from.

    The gradient that waits, the summand and three copies of the sum, as DTensor passes it on; no mask as yet.
    """
    if one.tp == 1 or not one.model.dropout:
        return 0
    return one.tokens * one.model.hidden_size * one.width + 4 * one.hidden_bytes - sum(masks(one, "mask").values())


def norm_gradient_bytes(one: Pass) -> int:
    """The gradient of a norm's output, as wide as the norm computes."""
    return one.own_tokens * one.model.hidden_size * (FP32_BYTES if composes_norm(one) else one.width)


def norm_backward_bytes(one: Pass) -> int:
    """Gradients alive at the worst moment of a norm's backward: of output and input, on CPU of three steps between."""
    return (5 if composes_norm(one) else 2) * norm_gradient_bytes(one)


def deferred_tensors(one: Pass) -> dict[str, int]:
    """Bytes of what a backward for inputs alone leaves for the weights of one layer: gradients of their outputs."""
    whole, inner = (one.tokens * size * one.width for size in (one.model.hidden_size, one.model.intermediate_size))
    grouped = whole * one.model.num_key_value_heads // one.model.num_attention_heads
    columns = {"q_proj": whole, "k_proj": grouped, "v_proj": grouped} | dict.fromkeys(one.model.kind.widening, inner)
    rows = dict.fromkeys(("o_proj", "down_proj"), whole)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm_gradient_bytes(one))
    return norms | rows | {name: size // one.tp for name, size in columns.items()}


def scores_tensors(one: Pass) -> dict[str, int]:
    """Bytes of eager attention's scores at the worst moment of its forward, the softmax; none for flash."""
    elements = one.tokens * one.model.num_attention_heads // one.tp * one.seq_len
    if composes_attention(one):
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


def logits_bytes(one: Pass) -> int:
    """This rank's part of the logits in fp32, of as many tokens as go through the loss at once."""
    return one.tokens // one.loss_chunks * math.ceil(one.model.vocab_size / one.vocabulary_tp) * FP32_BYTES


def loss_tensors(one: Pass) -> dict[str, int]:
    """Bytes at the worst moment of logits and cross-entropy, in fp32: backward of the log-softmax.

    torch's loss over logits cut along the vocabulary composes that of plain operations, of which four are alive.
    """
    names = ["log_probabilities", "log_probabilities.gradient", "logits.gradient"]
    return dict.fromkeys(names + ["probabilities"] * (one.vocabulary_tp > 1), logits_bytes(one))


def core_tensors(one: Pass) -> dict[str, int]:
    """Bytes of what a second forward of attention's core makes, of those that a layer keeps; it is given the rest."""
    block, model = block_tensors(one), one.model
    made = [name for name in block if name.startswith(CORE)]
    if one.cp > 1:  # gathered from all ranks
        made += ["attention.key", "attention.value"]
    elif composes_attention(one):
        made += ["attention.query", "attention.key", "attention.value"]
    elif model.attention == "eager":
        made += ["attention.query"] * (one.sequences > 1)  # heads and sequences as one dimension, as products take them
        if one.sequences > 1 or model.num_key_value_heads < model.num_attention_heads:
            made += ["attention.key", "attention.value"]  # or repeated to every head
    return {name: block[name] for name in made}


# What lies between query, key and value and the output: of plain operations, of the fused kernel, of context parallel.
CORE = tuple(f"attention.{name}" for name in ("future_mask", "weights", "dropped", "logsumexp", "chunks"))


def given_tensors(one: Pass) -> dict[str, int]:
    """Bytes of what attention's core is given."""
    size = one.tokens * one.model.hidden_size * one.width // one.tp
    grouped = size * one.model.num_key_value_heads // one.model.num_attention_heads
    return {"attention.query": size, "attention.key": grouped, "attention.value": grouped}


def product_tensors(one: Pass) -> dict[str, int]:
    """Bytes of the results that a selectively checkpointed layer keeps: of matrix products, and of attention.

    What a layer keeps anyway has its name of block_tensors. A row-parallel product is this rank's summand, whole.
    """
    block, model = block_tensors(one), one.model
    size, grouped, _ = given_tensors(one).values()
    kept = {"q_proj": size, "k_proj": grouped, "o_proj": size * one.tp, "down_proj": size * one.tp}
    shared = [f"mlp.{name.removesuffix('_proj')}" for name in model.kind.widening]
    if model.attention == "eager" or composes_attention(one):
        width = FP32_BYTES if composes_attention(one) else one.width
        scores = one.tokens * model.num_attention_heads // one.tp * one.seq_len * width
        seen = scores * (2 * one.cp + 1) // (4 * one.cp) if one.cp > 1 else scores
        kept |= {"v_proj": grouped, "scores": seen, "mixed": size * width // one.width}
    elif one.cp > 1:  # keys and values are gathered again
        kept |= {"v_proj": grouped}
        shared += ["attention.chunks", "attention.logsumexp"]
    else:
        shared += ["attention.value", "attention.output", "attention.logsumexp"]
    return kept | {name: block[name] for name in shared}


def taken_again(one: Pass, checkpointing: CheckpointingConfig) -> dict[str, int]:
    """Of what a selective forward kept what the second takes and lets go of; it stops before the last product."""
    if checkpointing.name != "selective":
        return {}
    block = block_tensors(one)
    products = product_tensors(one)
    return {name: size for name, size in products.items() if name not in block and name != "down_proj"}


def kept_by_layer(one: Pass, checkpointing: CheckpointingConfig, layer: int) -> dict[str, int]:
    """Bytes of what a layer, by its index in the whole model, keeps before its backward."""
    block = block_tensors(one)
    if checkpointing.name == "attention":
        made = core_tensors(one)
        left = {name: size for name, size in block.items() if name not in made}
        return left | {f"{name}.given": size for name, size in given_tensors(one).items() if name in made}
    if not checkpointing.calls_again(layer):
        return block
    return {"input": one.hidden_bytes} | (product_tensors(one) if checkpointing.name == "selective" else {})


def made_again(one: Pass, checkpointing: CheckpointingConfig, layer: int) -> dict[str, int]:
    """Bytes of what a layer's second forward adds to what it keeps; the input is a norm's, if that has no fp32 copy."""
    kept = kept_by_layer(one, checkpointing, layer)
    made = {name: size for name, size in block_tensors(one).items() if name not in kept}
    if "input" in kept and (one.width == FP32_BYTES or not composes_norm(one)):
        del made["input_layernorm.input"]
    return made


@dataclass(frozen=True)
class Activations:
    """Bytes held for backward by one micro-batch's pass through a stage, logits left out."""

    before_backward: int
    in_last_norm: int  # when backward is in the final norm or the last layer's second, what that scaled freed
    in_last_block: int  # when backward enters the stage's last layer, its recomputed tensors included
    at_last_scores: int  # when that layer computes (or recomputes) its attention
    second_forward: int  # what one layer's adds; 0 without checkpointing
    in_last_core: int = 0  # when backward comes to that layer's attention, if that alone is recomputed


def activations(one: Pass, stage: Stage, checkpointing: CheckpointingConfig) -> Activations:
    """What a pass through a stage keeps, and has made again in the backward of its last layer."""
    last = stage.layer_indices[-1]
    block, norm = block_tensors(one), head_tensors(one, stage)
    kept, again = kept_by_layer(one, checkpointing, last), made_again(one, checkpointing, last)
    layers, head = layers_bytes(one, stage, checkpointing), sum(norm.values())
    attended = ("input_layernorm", "attention.query", "attention.key", "attention.value", "attention.future_mask")
    until_scores = {name: size for name, size in block.items() if name.startswith(attended)}
    freed = ("mlp", "post_attention_layernorm.output", "post_attention_layernorm.normalised")
    done = sum(size for name, size in block.items() if name.startswith(freed))
    second = sum(again.values())
    in_final_norm = layers + head - used_by_weights(norm, one) if stage.holds_head else 0
    at_scores = layers - sum(kept.values()) + sum(until_scores.values())  # in forward
    if "input" in kept:  # in the second forward
        taken = taken_again(one, checkpointing)
        second -= sum(taken.values())
        at_scores = layers + sum(size for name, size in until_scores.items() if name in again)
        at_scores -= sum(size for name, size in taken.items() if name in ("q_proj", "k_proj", "v_proj"))
        done -= sum(size for name, size in kept.items() if name.startswith(freed))
        return Activations(
            layers + head, max(in_final_norm, layers + second - done), layers + second, at_scores, second
        )
    in_last_norm, core = max(in_final_norm, layers - done), 0
    if again:
        ended = ("mlp", "post_attention_layernorm", "attention.output")
        core = layers + second - sum(size for name, size in block.items() if name.startswith(ended))
        weights = sum(size for name, size in again.items() if name.startswith("attention.weights"))
        at_scores = max(at_scores, core - weights)
    return Activations(layers + head, in_last_norm, layers, at_scores, second, core)


def weights_alone(one: Pass, stage: Stage, checkpointing: CheckpointingConfig) -> tuple[int, int]:
    """What is kept when a backward for weights alone enters the last layer, and when it comes to the last matrix.

    It takes them from first to last and frees what their gradients are made of, the rest at its end: where layers are
    called again all of every second forward.
    """
    block, norm = block_tensors(one), head_tensors(one, stage)
    head, left = sum(norm.values()), layers_bytes(one, stage, checkpointing)
    for layer in stage.layer_indices:
        left -= used_again(one, checkpointing, layer)
        left += sum(made_again(one, checkpointing, layer).values()) if checkpointing.calls_again(layer) else 0
    freed = used_by_weights(norm, one) + statistics_bytes(norm, one)
    used = used_again(one, checkpointing, stage.layer_indices[-1])
    last = head - freed + norm["norm.output"] if norm else block["mlp.product"]
    return left + used + head, left + last


def layers_bytes(one: Pass, stage: Stage, checkpointing: CheckpointingConfig) -> int:
    """What the layers of a stage keep before backward, and what they share."""
    learned = one.model.kind.learned_positions
    own = one.seq_len // one.cp
    shared = 0 if learned else 2 * own * one.model.head_dim * one.width  # rotary tables
    if stage.holds_embedding:
        # Token ids, and which of them other ranks look up.
        shared += one.tokens * (INT64_BYTES + (one.vocabulary_tp > 1))
        shared += (own * INT64_BYTES if learned else 0) + sum(masks(one, "mask").values())
    return shared + sum(sum(kept_by_layer(one, checkpointing, layer).values()) for layer in stage.layer_indices)


def head_tensors(one: Pass, stage: Stage) -> dict[str, int]:
    return norm_tensors("norm", one) if stage.holds_head else {}


def statistics_bytes(kept: dict[str, int], one: Pass) -> int:
    """Bytes of what LayerNorm's one kernel, run once more for weight and bias, needs as it did for its input."""
    if one.model.kind.norm != "layer":
        return 0
    return sum(size for name, size in kept.items() if name.endswith(("norm.input", "norm.mean", "norm.rstd")))


def used_again(one: Pass, checkpointing: CheckpointingConfig, layer: int) -> int:
    """Bytes of what a layer keeps or makes again for its weights' gradients; a kept input stays after them."""
    block = block_tensors(one)
    statistics = statistics_bytes(block, one)
    if statistics and checkpointing.calls_again(layer):  # the first norm's input is the layer's
        statistics -= one.hidden_bytes
    return used_by_weights(block, one) + statistics


def used_by_weights(kept: dict[str, int], one: Pass) -> int:
    """Bytes of what is kept for weights' gradients only: inputs of matrices, and what a norm scales on CPU."""
    ends = ["norm.output", "norm.normalised", "mlp.product"]
    if one.model.attention == "eager":
        ends.append("attention.output")  # the flash kernel keeps it too
    return sum(size for name, size in kept.items() if name.endswith(tuple(ends)))
