"""Floating-point operations of one training step of the whole global batch, counted by matrices. Imports no torch.

A product of an (m, k) with a (k, n) matrix is 2 m n k operations. Counted are the projections, attention's two products
and the head. Attention is not halved for its causal mask. Left out: embedding lookup, norms, rotary, softmax,
activation functions, loss and optimizer. A model from outside has been asked: its operators were counted.

MFU (PaLM, arXiv 2204.02311, appendix B) counts what the model asks for: `model_flops`, forward and twice as much for
backward, whatever is run again. HFU counts what the hardware ran: `executed_flops`, which adds the second forwards of
checkpointing and the scores that fused attention kernels make again in backward. Both are over all ranks: those that
divide the batch, the matrices or the depth divide the operations; of tensor-parallel ranks that leave the head whole
each multiplies by all of it.
"""

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.partition import Stage, split_into_stages, whole_model

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
    """Forward of one layer over the step: q and o, k and v, the MLP's matrices, attention."""
    model = config.model
    if model.asked is not None:
        return config.train.global_batch * model.asked.layers_flops // model.num_hidden_layers
    groups = model.num_key_value_heads * model.head_dim
    attention = 2 * model.hidden_size * (model.hidden_size + groups)
    mlp = (len(model.architecture.widening) + 1) * last_projection_flops(config)
    return 2 * tokens(config) * attention + mlp + 2 * product_flops(config)


def head_flops(config: RunConfig) -> int:
    """Forward of the head over the step; a tied one multiplies all the same. Of a model asked, all but its layers."""
    if config.model.asked is not None:
        return config.train.global_batch * (config.model.asked.forward_flops - config.model.asked.layers_flops)
    return 2 * tokens(config) * config.model.hidden_size * config.model.vocab_size


def model_flops(config: RunConfig) -> int:
    """What MFU counts: every matrix of forward, and backward as two forwards.

    PaLM's 6 N + 12 L h s a token, where N are the parameters of matrices that multiply: neither embedding nor norms.
    """
    return (1 + BACKWARD) * (config.model.num_hidden_layers * layer_flops(config) + head_flops(config))


def executed_flops(config: RunConfig, layout: Layout, device: str = "cpu", whole_second_forward: bool = False) -> int:
    """What HFU will count, by the attention kernel that torch is expected to take. device is cpu or cuda."""
    return executed_flops_with(config, layout, takes_fused_kernel(config, device), whole_second_forward)


def executed_flops_with(config: RunConfig, layout: Layout, fused: bool, whole_second_forward: bool = False) -> int:
    """What HFU counts: the operations of a step that run, over all ranks, where a fused kernel makes attention or not.

    Which it was, a run's ranks have heard.
    """
    again = recomputed_flops(config, layout, whole_second_forward, fused)
    made = model_flops_under_layout(config, layout) + recomputed_logits_flops(config)
    made += recomputed_scores_flops(config, layout) if fused else 0
    return made + again + replicated_head_flops(config, layout)


def takes_fused_kernel(config: RunConfig, device: str) -> bool:
    """Whether attention is expected to run as one fused kernel on cpu or cuda.

    On CUDA torch has none for grouped heads in fp32: flash and cuDNN take 16 bit, the memory-efficient one no groups.
    On CPU none has dropout. It multiplies the matrices one by one there, and keeps the scores.
    """
    model = config.model
    if model.attention != "flash":
        return False
    if device == "cuda":
        return config.precision.compute != "float32" or model.num_key_value_heads == model.num_attention_heads
    if model.asked is not None:  # its dropout may be elsewhere
        return model.asked.step_flops > (1 + BACKWARD) * model.asked.forward_flops
    return model.dropout == 0


def replicated_head_flops(config: RunConfig, layout: Layout) -> int:
    """What tensor-parallel ranks all do alike: the head, where it is not cut."""
    times = 1 + BACKWARD + (config.train.loss_chunks > 1)
    return (layout.tp // layout.vocabulary_tp - 1) * times * head_flops(config)


def model_flops_under_layout(config: RunConfig, layout: Layout) -> int:
    """Forward and backward as the layout runs them: context parallelism skips scores that the causal mask hides."""
    return model_flops(config) - (1 + BACKWARD) * config.model.num_hidden_layers * 2 * causal_skipped_flops(
        config, layout
    )


def causal_skipped_flops(config: RunConfig, layout: Layout) -> int:
    """Of a product of attention what is not computed: each of the 2 cp chunks of a sequence sees those up to itself.

    Without context parallelism one kernel takes whole sequences, and nothing is left out.
    """
    chunks = 2 * layout.cp
    return product_flops(config) * (chunks - 1) // (2 * chunks) if layout.cp > 1 else 0


def recomputed_flops(
    config: RunConfig, layout: Layout, whole_second_forward: bool = False, fused: bool | None = None
) -> int:
    """What checkpointing runs a second time, over all ranks; 0 without it.

    torch stops a second forward before a layer's last projection, whose result nothing in backward needs unless it is
    dropped from, as the mask is made behind it. Where an
    engine's own projection saves its input only after it has run (DeepSpeed's stage 3, unless
    strategy.options.memory_efficient_linear=false) that runs too: whole_second_forward. A selective one takes all other
    products from the first. fused: whether one kernel makes attention; by default as expected on a CPU.
    """
    model = config.model
    parts = split_into_stages(model, layout) if layout.pp > 1 else [whole_model(model)]
    calls = sum(recomputed_layers(config, layout, part) for part in parts)
    if model.asked is not None and calls and not (whole_second_forward and model.asked.unfinished_are_linear):
        return config.train.global_batch * model.asked.again_flops * calls // model.num_hidden_layers
    last = last_projection_flops(config)
    stopped = 0 if whole_second_forward or recomputes_last_projection(config) else last
    whole_layer = layer_flops(config) - 2 * causal_skipped_flops(config, layout)
    one_kernel = takes_fused_kernel(config, "cpu") if fused is None else fused
    kinds = {"selective": 0, "attention": attention_recompute_flops(config, layout, one_kernel)}
    return calls * kinds.get(config.checkpointing.name, whole_layer - stopped)


def recomputes_last_projection(config: RunConfig) -> bool:
    """Whether a layer's second forward makes its last projection too: for a mask behind it, or as compiled code."""
    return config.model.dropout > 0 or config.train.compile


def recomputed_layers(config: RunConfig, layout: Layout, stage: Stage) -> int:
    """Layers of a stage that run again for each micro-batch, or their attention; one that runs twice counted twice.

    A backward in two halves (zero bubble, arXiv 2401.10241) has a second forward for each, but for the first stage,
    whose inputs need no gradient. The core of attention has no weights: only the half that is for inputs needs it.
    """
    if config.checkpointing.name == "attention":
        return stage.layers
    halved = layout.pp > 1 and layout.schedule == "zero_bubble" and not stage.holds_embedding
    return sum(map(config.checkpointing.recomputes_layer, stage.layer_indices)) * (2 if halved else 1)


def attention_recompute_flops(config: RunConfig, layout: Layout, fused: bool) -> int:
    """A second forward of attention's core over the step, in every layer once.

    A fused kernel is one operator. Of plain operators torch stops before the last product, which nothing needs: with
    context parallelism that of a rank's second chunk, whose first sees (c + 1) / (4 c + 2) of what both do.
    """
    product = product_flops(config) - causal_skipped_flops(config, layout)
    if fused:
        return 2 * product
    c = layout.cp
    return product + (product * (c + 1) // (4 * c + 2) if c > 1 else 0)


def recomputed_logits_flops(config: RunConfig) -> int:
    """The head once more in backward, where it goes through the tokens in parts and keeps no part's logits."""
    return head_flops(config) if config.train.loss_chunks > 1 else 0


def recomputed_scores_flops(config: RunConfig, layout: Layout) -> int:
    """Queries with keys once more in backward: a fused kernel keeps no scores (arXiv 2205.14135, algorithm 4)."""
    model = config.model
    if model.asked is not None:
        return config.train.global_batch * model.asked.remade_flops
    return model.num_hidden_layers * (product_flops(config) - causal_skipped_flops(config, layout))
