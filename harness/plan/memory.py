"""One rank's memory, predicted from configuration, layout and the widths its engine allocates. Imports no torch.

Data-parallel layouts only; other axes are refused before. Left out: the padding of shards, the allocator's
fragmentation.
"""

from dataclasses import dataclass

from harness.config import ModelConfig, RunConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.sizes import group_parameter_counts, layer_parameter_count, parameter_count

FP32_BYTES = 4
INT64_BYTES = 8
WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a dtype by torch's name
# Outside torch's allocator. cpu: resident size of a rank after three steps of DeepSpeed ZeRO-3 on a 66 kB model
# (psutil's rss, torch 2.13, DeepSpeed 0.19.8: 0.399e9; plain torch 0.343e9). cuda: a context and its libraries'
# workspaces, as commonly reported, not measured here.
PROCESS_BYTES = {"cpu": 400_000_000, "cuda": 500_000_000}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank. Each part at its own most; `at_peak` holds what fills the peak at one moment."""

    parameter_bytes: int  # at rest between steps
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # held for backward at most
    loss_bytes: int  # logits and cross-entropy
    communication_buffer_bytes: int
    process_bytes: int  # interpreter, libraries, context: never in torch's allocator; only for whether a host is enough
    at_peak: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """What torch's allocator holds at the worst moment of a step."""
        return sum(self.at_peak.values())


def norm_tensors(name: str, model: ModelConfig, tokens: int, width: int, device: str) -> dict[str, int]:
    """Bytes that one RMSNorm keeps for backward, and its output, kept by the projections behind it.

    On CPU torch composes the norm of plain operations in fp32, which keep two fp32 copies; on CUDA one kernel keeps
    its input.
    """
    size = tokens * model.hidden_size
    kept = {f"{name}.input": size * (FP32_BYTES if device == "cpu" else width), f"{name}.rstd": tokens * FP32_BYTES}
    if device == "cpu":
        kept[f"{name}.normalised"] = size * FP32_BYTES
    return kept | {f"{name}.output": size * width}


def attention_tensors(model: ModelConfig, sequences: int, seq_len: int, width: int) -> dict[str, int]:
    """Bytes that attention keeps for backward, its four projections included. The output is the input of o_proj."""
    size = sequences * seq_len * model.hidden_size * width
    rows = sequences * model.num_attention_heads * seq_len
    if model.attention == "flash":  # arXiv 2205.14135: the scores are never stored
        grouped = size * model.num_key_value_heads // model.num_attention_heads
        return {"query": size, "key": grouped, "value": grouped, "output": size, "logsumexp": rows * FP32_BYTES}
    kept = {"query": size, "key": size, "value": size, "output": size}  # keys and values repeated to every head
    kept |= {"future_mask": seq_len * seq_len, "weights_fp32": rows * seq_len * FP32_BYTES}
    return kept if width == FP32_BYTES else kept | {"weights": rows * seq_len * width}


def block_tensors(
    model: ModelConfig, sequences: int, seq_len: int, compute: str, device: str = "cpu"
) -> dict[str, int]:
    """Bytes of every tensor that one decoder layer keeps for backward, by name; compute is torch's dtype name."""
    width, tokens = WIDTH_BYTES[compute], sequences * seq_len
    inner = tokens * model.intermediate_size * width
    attention = attention_tensors(model, sequences, seq_len, width)
    return {
        **norm_tensors("input_layernorm", model, tokens, width, device),
        **{f"attention.{name}": size for name, size in attention.items()},
        **norm_tensors("post_attention_layernorm", model, tokens, width, device),
        **{f"mlp.{name}": inner for name in ("gate", "up", "silu", "product")},
    }


def block_backward_bytes(model: ModelConfig, sequences: int, seq_len: int, compute: str) -> int:
    """Gradients of intermediates alive at the worst moment of a layer's backward, beyond what is kept for it.

    At the SwiGLU product: gradients of product, silu and up, less the product freed before, and of the residual.
    """
    tokens = sequences * seq_len
    return tokens * (2 * model.intermediate_size + model.hidden_size) * WIDTH_BYTES[compute]


def scores_tensors(model: ModelConfig, sequences: int, seq_len: int, compute: str, device: str) -> dict[str, int]:
    """Bytes of eager attention's scores at the worst moment of its forward, the softmax; none for flash."""
    if model.attention == "flash":
        return {}
    elements, width = sequences * model.num_attention_heads * seq_len * seq_len, WIDTH_BYTES[compute]
    scores = {"scaled": elements * width, "masked": elements * width, "softmax": elements * FP32_BYTES}
    if width < FP32_BYTES and device == "cpu":  # on CUDA the softmax kernel widens as it reads
        scores["widened"] = elements * FP32_BYTES
    return scores


def loss_tensors(model: ModelConfig, sequences: int, seq_len: int) -> dict[str, int]:
    """Bytes at the worst moment of logits and cross-entropy, in fp32: backward of the log-softmax."""
    size = sequences * seq_len * model.vocab_size * FP32_BYTES
    return dict.fromkeys(("log_probabilities", "log_probabilities.gradient", "logits.gradient"), size)


@dataclass(frozen=True)
class Activations:
    """Bytes held for backward by one micro-batch, logits left out."""

    before_backward: int
    in_last_block: int  # when backward enters the last layer, its recomputed tensors included
    at_last_scores: int  # when the last layer computes (or recomputes) its attention

    @property
    def most(self) -> int:
        return max(self.before_backward, self.in_last_block)


def activations(
    model: ModelConfig, sequences: int, seq_len: int, compute: str, checkpointing: str, device: str = "cpu"
) -> Activations:
    """What one micro-batch of `sequences` keeps; with full checkpointing the layers' inputs, and one layer's own."""
    width, tokens = WIDTH_BYTES[compute], sequences * seq_len
    block = block_tensors(model, sequences, seq_len, compute, device)
    shared = tokens * INT64_BYTES + 2 * seq_len * model.head_dim * width  # token ids, rotary tables
    head = sum(norm_tensors("norm", model, tokens, width, device).values())
    attended = ("input_layernorm", "attention.query", "attention.key", "attention.value", "attention.future_mask")
    until_scores = sum(size for name, size in block.items() if name.startswith(attended))
    own = sum(block.values())
    if checkpointing == "none":
        layers = shared + model.num_hidden_layers * own
        return Activations(layers + head, layers, layers - own + until_scores)
    layers = shared + model.num_hidden_layers * tokens * model.hidden_size * width
    # Where the norm keeps the layer's input itself and not an fp32 copy, it is there already.
    again = block["input_layernorm.input"] if width == FP32_BYTES or device != "cpu" else 0
    return Activations(layers + head, layers + own - again, layers + until_scores - again)


def buffer_tensors(config: RunConfig, layout: Layout, widths: Widths) -> dict[str, int]:
    """Bytes of what a rank holds to communicate, by name."""
    total, groups = parameter_count(config.model), group_parameter_counts(config.model)
    compute = WIDTH_BYTES[config.precision.compute]
    buffers: dict[str, int] = {"engine": widths.buffer_bytes}
    if layout.data_parallel == "ddp":
        # DDP's buckets are as large as the model in its own width. With views fp32 gradients lie in them; in mixed
        # precision they are there beside the fp32 gradients.
        copies = int(config.precision.mixed) + int(not bucket_views(config))
        buffers["ddp_buckets"] = copies * total * compute
    if layout.data_parallel == "fsdp" and layout.zero_stage < 3:  # whole from forward to the end of backward
        buffers["gathered"] = (total + groups[0]) * widths.gathered
    elif layout.zero_stage == 3:
        buffers["gathered"] = gathered_parameter_count(config.model) * widths.gathered
    return buffers


def gathered_parameter_count(model: ModelConfig) -> int:
    """Parameters whole at once when they are sharded: a group in use beside the gather buffer of one group.

    A tied embedding serves first and last, so fully_shard keeps it gathered all the way; DeepSpeed needs less.
    """
    groups = group_parameter_counts(model)
    if not model.tie_word_embeddings:
        return sum(groups[:2])
    layer, root = layer_parameter_count(model), model.vocab_size * model.hidden_size + model.hidden_size
    return root + max(root, 2 * layer)


def unreduced_bytes(config: RunConfig, layout: Layout) -> int:
    """Where gradients are sharded: the largest group's whole gradient and its flat copy on the wire."""
    if layout.shards("gradients") == 1:
        return 0
    widths = WIDTH_BYTES[config.precision.compute] + WIDTH_BYTES[config.precision.reduce]
    return group_parameter_counts(config.model)[0] * widths


def bucket_views(config: RunConfig) -> bool:
    return bool(config.strategy.options.get("gradient_as_bucket_view", False))


def gradients_outlive_step(config: RunConfig, layout: Layout) -> bool:
    """Whether memory of gradients is held when a micro-batch's backward begins."""
    if layout.accumulation(config.train) > 1:
        return True
    if layout.data_parallel == "ddp":
        return bucket_views(config) and not config.precision.mixed
    return layout.data_parallel != "fsdp" and layout.dp > 1


def estimate(config: RunConfig, layout: Layout, widths: Widths, device: str = "cpu") -> MemoryEstimate:
    """The memory of the fullest rank. device is cpu or cuda: torch keeps different tensors on each.

    Model state is ZeRO's (arXiv 1910.02054, section 5). The peak is the fullest of four moments of the last
    micro-batch: backward of the loss, backward of the last layer, its attention, and the end of backward.
    Raises UserError if the global batch leaves a remainder.
    """
    model, train = config.model, config.train
    total = parameter_count(model)
    parameter_bytes = -(-widths.parameters * total // layout.shards("parameters"))
    gradient_bytes = -(-widths.gradients * total // layout.shards("gradients"))
    optimizer_bytes = -(-widths.optimizer * total // layout.shards("optimizer"))
    compute = config.precision.compute
    shape = (model, train.micro_batch, train.seq_len, compute)
    kept = activations(*shape, config.checkpointing.name, device)
    loss_bytes = sum(loss_tensors(*shape[:3]).values())
    buffer_bytes, unreduced = sum(buffer_tensors(config, layout, widths).values()), unreduced_bytes(config, layout)
    held = gradient_bytes if gradients_outlive_step(config, layout) else 0
    moments = (
        {"gradients": held, "buffers": buffer_bytes, "activations": kept.before_backward, "loss": loss_bytes},
        {
            "gradients": held,
            "buffers": buffer_bytes + unreduced,
            "activations": kept.in_last_block,
            "temporaries": block_backward_bytes(*shape),
        },
        {
            "gradients": held,
            "buffers": buffer_bytes,
            "activations": kept.at_last_scores,
            "temporaries": sum(scores_tensors(*shape, device).values()),
        },
        {"gradients": gradient_bytes, "buffers": buffer_bytes + unreduced},
    )
    state = {"parameters": parameter_bytes, "optimizer": optimizer_bytes}
    return MemoryEstimate(
        parameter_bytes,
        gradient_bytes,
        optimizer_bytes,
        kept.most,
        loss_bytes,
        buffer_bytes + unreduced,
        PROCESS_BYTES[device],
        state | max(moments, key=lambda moment: sum(moment.values())),
    )
