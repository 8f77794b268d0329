"""Floating-point operations of one training step of the whole global batch, counted by matrices. Imports no torch.

A product of an (m, k) with a (k, n) matrix is 2 m n k operations. The projections, attention's two products and the
head count; attention is not halved for its causal mask. Embedding lookup, norms, rotary embedding, softmax, activation
functions, loss and optimizer are left out. A Hugging Face model was traced, and its operators counted.

MFU (PaLM, arXiv 2204.02311, appendix B) counts what the model requires: `model_flops`, forward and twice as much for
backward, whatever is recomputed. HFU counts what the hardware ran: `executed_flops`, which adds the second forwards of
checkpointing and the scores that fused attention kernels compute again in backward. Both are over all ranks: ranks that
divide the batch, the matrices or the depth divide the operations; tensor-parallel ranks that leave the head whole each
multiply by all of it.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, Device, RunConfig
from harness.cost_model.pipeline import split_passes
from harness.layout.layer_spec import last_product, layer_matrices, projection_flops
from harness.layout.layout import Layout
from harness.layout.partition import Stage, split_into_stages, stages_of_rank

BACKWARD = 2  # forwards that a backward costs: a product for the input's gradient, and one for the weight's


class Operations(NamedTuple):
    """The operations per step of the parts of a model."""

    layers: int  # of the forward of all layers
    head: int  # of the forward of all that is not in layers; a tied head counts as well
    scores: int  # of queries with keys in all layers, which the backward of a fused kernel runs again
    recomputed: int  # of a second forward of all layers
    recomputed_to_end: int  # of one that an engine does not stop before a last linear module
    frozen: int = 0  # of the forward of matrices whose own gradients no backward computes


def operations(config: RunConfig, tp: int = 1) -> Operations:
    """Return the operations of a model, by its sizes, or of a library's by its trace of one sequence.

    They are those of `tp` ranks, all of which compute routers and a part of adapters.
    torch stops a second forward before the last projection, unless dropout follows it: the mask is drawn behind it; or
    experts, whose outputs are summed behind it.
    """
    model, train, info = config.model, config.train, config.model.hf_info
    if info is not None:
        again, layers = info.checkpoint_recompute_flops, info.layers_flops
        to_end = layers if info.not_recomputed_are_linear else again
        traced = (layers, info.forward_flops - layers, info.attention_recompute_flops, again, to_end)
        return Operations(*(train.global_batch * flops for flops in traced))
    depth, tokens = model.num_hidden_layers, train.global_batch * train.seq_len
    products, scores = [*projection_flops(model, tokens, tp).values()], depth * attention_product_flops(config)
    layers = depth * sum(products) + 2 * scores
    stopped = layers if model.dropout > 0 or model.num_experts else layers - depth * products[-1]
    head, frozen = 2 * tokens * model.hidden_size * model.vocab_size, 0
    if model.adapter.is_enabled:
        frozen = head + depth * sum(2 * tokens * matrix.elements for matrix in layer_matrices(model))
    return Operations(layers, head, scores, stopped, layers, frozen)


def attention_product_flops(config: RunConfig) -> int:
    """Return the operations per step of one of a layer's two attention products.

    They are queries with keys, and scores with values.
    """
    model = config.model
    return 2 * config.train.global_batch * config.train.seq_len**2 * model.num_attention_heads * model.head_size


def model_flops(config: RunConfig) -> int:
    """Return the operations per step that MFU counts: every matrix of forward, and backward as two forwards.

    They are PaLM's 6 N + 12 L h s per token, where N counts the parameters of matrices that multiply: neither embedding
    nor norms. A frozen matrix has 4 for each parameter, as backward computes its input's gradient alone.
    """
    own = operations(config)
    return (1 + BACKWARD) * (own.layers + own.head) - own.frozen


def executed_flops(
    config: RunConfig, layout: Layout, device: Device = "cpu", recomputes_last_projection: bool = False
) -> int:
    """Return the operations per step that HFU will count, by the attention kernel that torch is expected to choose.

    `device` is cpu or cuda; `recomputes_last_projection` as StateWidths has it.
    """
    return executed_flops_with(config, layout, takes_fused_kernel(config, device), recomputes_last_projection)


def executed_flops_with(
    config: RunConfig, layout: Layout, fused: bool, recomputes_last_projection: bool = False
) -> int:
    """Return the operations of a step that run over all ranks, which HFU counts.

    `fused` is whether a fused kernel computes attention, as a run's ranks have observed it.
    """
    return sum(executed_flops_parts(config, layout, fused, recomputes_last_projection).values())


def executed_flops_parts(
    config: RunConfig, layout: Layout, fused: bool, recomputes_last_projection: bool
) -> dict[str, int]:
    """Return the operations of executed_flops_with() by what they are of.

    Where the head goes through the tokens in parts, it keeps no part's logits, and runs again in backward. A fused
    kernel keeps no scores, and multiplies queries with keys again (arXiv 2205.14135, algorithm 4). Tensor-parallel
    ranks repeat a head that is not cut, routers, and what a library's plan leaves whole.
    """
    own, repeated = operations(config), operations(config, layout.tp)
    skipped = config.model.num_hidden_layers * causal_skipped_flops(config, layout)
    logits = own.head if config.train.loss_chunks > 1 else 0
    whole_head = (layout.tp // layout.vocabulary_tp - 1) * ((1 + BACKWARD) * own.head + logits)
    return {
        "the model": model_flops(config) - (1 + BACKWARD) * 2 * skipped,
        "logits computed again": logits,
        "attention scores computed again": own.scores - skipped if fused else 0,
        "checkpointed layers computed again": recomputed_flops(config, layout, recomputes_last_projection, fused),
        "what every tensor-parallel rank computes": whole_head
        + repeated_flops(config, layout, fused)
        + (1 + BACKWARD) * (repeated.layers - own.layers),
    }


def repeated_flops(config: RunConfig, layout: Layout, fused: bool) -> int:
    """Return the operations of all ranks but one where a library's plan lets each compute the same; 0 without one."""
    info, layers = config.model.hf_info, config.model.num_hidden_layers
    if info is None:
        return 0
    forward, scores, checkpointed = (config.train.global_batch * flops for flops in info.repeated_flops)
    calls = sum(recomputed_layers(config, layout, stage) for stage in split_into_stages(config.model, layout))
    return (layout.tp - 1) * ((1 + BACKWARD) * forward + scores * fused + calls * checkpointed // layers)


def takes_fused_kernel(config: RunConfig, device: Device) -> bool:
    """Return whether attention is expected to run as one fused kernel on this device, cpu or cuda.

    On a CPU none has dropout; a library's attention has some if its trace ran no more in backward than the two forwards
    that a backward costs, as the model's dropout may be elsewhere. On CUDA torch has none for grouped heads in fp32
    (flash and cuDNN take 16 bit, the memory-efficient kernel takes no groups), but they are repeated there
    (harness.models.decoder). Without a kernel torch multiplies the matrices one by one, and keeps the scores.
    """
    model, info = config.model, config.model.hf_info
    on_cpu = model.dropout == 0 if info is None else info.step_flops > (1 + BACKWARD) * info.forward_flops
    return model.attention == "flash" and (device == "cuda" or on_cpu)


def causal_skipped_flops(config: RunConfig, layout: Layout) -> int:
    """Return the operations of an attention product that context parallelism skips.

    Each of the 2 cp chunks of a sequence sees those up to itself, where ranks gather keys. Otherwise one kernel takes
    whole sequences, and nothing is left out.
    """
    chunks = 2 * layout.cp
    return attention_product_flops(config) * (chunks - 1) // (2 * chunks) if layout.gathers_keys else 0


def recomputed_flops(
    config: RunConfig, layout: Layout, recomputes_last_projection: bool = False, fused: bool | None = None
) -> int:
    """Return the operations that checkpointing runs a second time, over all ranks; 0 without it.

    torch stops a second forward before a layer's last projection, whose result nothing in backward needs unless dropout
    follows it, as the mask is drawn behind it. Where an engine's own projection saves its input only after it has run
    (DeepSpeed's stage 3, unless strategy.options.memory_efficient_linear=false), that projection runs too, and
    `recomputes_last_projection` is true. Selective checkpointing takes the products that it has saved from the first
    forward. `fused` is whether one kernel computes attention, by default as expected on a CPU: it is one operator. With
    plain operators torch stops before the last product of attention's core, which nothing needs: with context
    parallelism that is a product of a rank's second chunk, and the first chunk sees (c + 1) / (4 c + 2) of what both
    see.
    """
    model, train, checkpointing = config.model, config.train, config.checkpointing
    calls = sum(recomputed_layers(config, layout, stage) for stage in split_into_stages(model, layout))
    runs_to_end = recomputes_last_projection or train.compile or config.precision.has_recipe
    if checkpointing.name == "selective":
        products = projection_flops(model, train.global_batch * train.seq_len, layout.tp)
        return int(calls * recomputed_product_flops(model, checkpointing, products, runs_to_end))
    if checkpointing.name == "attention":
        skipped, c = causal_skipped_flops(config, layout), layout.cp
        product = attention_product_flops(config) - skipped
        of_first_chunk = product * (c + 1) // (4 * c + 2) if skipped else 0
        is_fused = takes_fused_kernel(config, "cpu") if fused is None else fused
        return int(calls * (2 * product if is_fused else product + of_first_chunk))
    own = operations(config, layout.tp)
    of_all = own.recomputed_to_end if runs_to_end else own.recomputed
    return int(calls * of_all // model.num_hidden_layers - calls * 2 * causal_skipped_flops(config, layout))


def scaled_flops(config: RunConfig, layout: Layout, rank: int) -> int:
    """Return the operations of this rank's projections in a step: what a recipe scales.

    A second forward stops behind the last of them, which saves its inputs when it has run.
    """
    shares = layout.dp * layout.cp * layout.tp
    products = projection_flops(config.model, config.train.global_batch * config.train.seq_len)
    again = 0 if config.checkpointing.name == "attention" else sum(products.values())
    if config.checkpointing.name == "selective":
        again = recomputed_product_flops(config.model, config.checkpointing, products, runs_to_end=True)
    stages = stages_of_rank(config.model, layout, rank)
    once = sum(stage.layers for stage in stages) * (1 + BACKWARD) * sum(products.values())
    return int((once + sum(recomputed_layers(config, layout, stage) for stage in stages) * again) // shares)


def recomputed_product_flops(
    model: ModelConfig, checkpointing: CheckpointingConfig, products: Mapping[str, int], runs_to_end: bool
) -> int:
    """Return the operations of those products of one layer's that a selective second forward computes again.

    The last one is not run, as in every second forward, unless dropout follows it or `runs_to_end` is true.
    """
    names = checkpointing.recomputed_products(products)
    is_last_run = runs_to_end or model.dropout > 0 or model.num_experts > 0
    return sum(products[name] for name in names if is_last_run or name != last_product(model))


def recomputed_layers(config: RunConfig, layout: Layout, stage: Stage) -> int | Fraction:
    """Return how many second forwards of a layer, or of its attention, a stage runs for each micro-batch, on average.

    A backward in two halves (zero bubble, arXiv 2401.10241) has a second forward for each half, except in the first
    stage, whose inputs need no gradient. The core of attention has no weights: only the half for inputs needs it.
    """
    if config.checkpointing.name == "attention":
        return stage.layers
    forwards = Fraction(1)
    if layout.splits_backward and not stage.holds_embedding:
        micro_batches, pp_rank = layout.grad_accumulation_steps(config.train), layout.pp_rank_of(stage.index)
        own = layout.stage_indices(pp_rank).index(stage.index)
        forwards += Fraction(split_passes(layout, micro_batches, pp_rank)[own], micro_batches)
    return sum(map(config.checkpointing.recomputes_layer, stage.layer_indices)) * forwards
