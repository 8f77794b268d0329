"""Floating-point operations of one training step of the whole global batch, counted by matrices. Imports no torch.

A product of an (m, k) with a (k, n) matrix is 2 m n k operations. Counted are the projections, attention's two products
and the head. Attention is not halved for its causal mask. Left out: embedding lookup, norms, rotary, softmax,
activation functions, loss and optimizer.

MFU (PaLM, arXiv 2204.02311, appendix B) counts what the model asks for: `model_flops`, forward and twice as much for
backward, whatever is run again. HFU counts what the hardware ran: `executed_flops`, which adds the second forwards of
checkpointing and the scores that fused attention kernels make again in backward. Both are over all ranks: those that
divide the batch, the matrices or the depth divide the operations; of tensor-parallel ranks that leave the head whole
each multiplies by all of it.
"""

from harness.config import ModelConfig, RunConfig
from harness.layout import Layout
from harness.placement import stages, whole

BACKWARD = 2  # forwards that a backward costs: a product for the gradient of the input, one for the weight's


def tokens(config: RunConfig) -> int:
    """Of a step."""
    return config.train.global_batch * config.train.seq_len


def product_flops(config: RunConfig) -> int:
    """One of a layer's two products of attention, over the step: queries with keys, or scores with values."""
    return 2 * tokens(config) * config.train.seq_len * config.model.hidden_size


def last_projection_flops(config: RunConfig) -> int:
    """The last matrix of a layer, down_proj, over the step."""
    return 2 * tokens(config) * config.model.hidden_size * config.model.intermediate_size


def layer_flops(config: RunConfig) -> int:
    """Forward of one layer over the step: q and o, k and v, three matrices of SwiGLU, attention."""
    model = config.model
    groups = model.num_key_value_heads * model.head_dim
    attention = 2 * model.hidden_size * (model.hidden_size + groups)
    return 2 * tokens(config) * attention + 3 * last_projection_flops(config) + 2 * product_flops(config)


def head_flops(config: RunConfig) -> int:
    """Forward of the head over the step; a tied one multiplies all the same."""
    return 2 * tokens(config) * config.model.hidden_size * config.model.vocab_size


def model_flops(config: RunConfig) -> int:
    """What MFU counts: every matrix of forward, and backward as two forwards.

    PaLM's 6 N + 12 L h s a token, where N are the parameters of matrices that multiply: neither embedding nor norms.
    """
    return (1 + BACKWARD) * (config.model.num_hidden_layers * layer_flops(config) + head_flops(config))


def executed_flops(config: RunConfig, layout: Layout, device: str = "cpu", whole_second_forward: bool = False) -> int:
    """What HFU counts: the operations of a step that run, over all ranks. device is cpu or cuda."""
    again = recomputed_flops(config, layout, whole_second_forward)
    return model_flops(config) + again + repeated_flops(config, layout) + remade_scores_flops(config, device)


def repeated_flops(config: RunConfig, layout: Layout) -> int:
    """What tensor-parallel ranks all do alike: the head, where it is not cut."""
    return (layout.tp // layout.vocabulary_tp - 1) * (1 + BACKWARD) * head_flops(config)


def recomputed_flops(config: RunConfig, layout: Layout, whole_second_forward: bool = False) -> int:
    """What checkpointing runs a second time, over all ranks; 0 without it.

    torch stops a second forward before a layer's last projection, whose result nothing in backward needs. Where an
    engine's own projection saves its input only after it has run (DeepSpeed's stage 3, unless
    strategy.options.memory_efficient_linear=false) that runs too: whole_second_forward. A backward in two halves (zero
    bubble, arXiv 2401.10241) has a second forward for each, but for the first stage, whose inputs need no gradient.
    """
    if config.checkpointing.name != "full":
        return 0
    skipped = 0 if whole_second_forward else last_projection_flops(config)
    return second_forwards(config.model, layout) * (layer_flops(config) - skipped)


def second_forwards(model: ModelConfig, layout: Layout) -> int:
    """Layers that checkpointing runs again for each micro-batch, one that is run twice counted twice."""
    halved = layout.pp > 1 and layout.schedule == "zero_bubble"
    parts = stages(model, layout) if layout.pp > 1 else [whole(model)]
    return sum(part.layers * (2 if halved and not part.holds_embedding else 1) for part in parts)


def remade_scores_flops(config: RunConfig, device: str) -> int:
    """Queries with keys once more in backward, where a fused kernel keeps no scores (arXiv 2205.14135, algorithm 4).

    On CUDA torch has no fused kernel for grouped heads in fp32: flash and cuDNN take 16 bit, the memory-efficient one
    no groups. It multiplies the matrices one by one there, and keeps the scores.
    """
    model = config.model
    grouped = model.num_key_value_heads != model.num_attention_heads
    fused = model.attention == "flash" and not (device == "cuda" and config.precision.compute == "float32" and grouped)
    return fused * model.num_hidden_layers * product_flops(config)
