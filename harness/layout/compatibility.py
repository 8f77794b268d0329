"""The reasons why a layout cannot train a model with a batch, whatever the engine; each names its key and a remedy."""

import math
from collections.abc import Iterator

from harness.config.from_dict import divisors_text
from harness.config.model import HFModelInfo
from harness.config.schema import RunConfig
from harness.config.strategy import V_SCHEDULES
from harness.layout.layer_spec import SHARD_DIM, STYLES, layer_matrices
from harness.layout.layout import Layout, micro_batches_per_round
from harness.layout.partition import split_into_stages
from harness.layout.refusals import refusals
from harness.util.text import UserError

SCALED_MULTIPLE = 16  # of all dimensions of scaled products

GROUPED_ALIGNMENT = 16  # bytes, of which torch's grouped products take rows only in multiples


def incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield one line for every reason why the configuration cannot run as this layout; nothing if it can."""
    train, checkpointing, pp_enabled = config.train, config.checkpointing, layout.pp_enabled
    try:
        micro_batches = layout.grad_accumulation_steps(train)
    except UserError as error:
        yield str(error)
        return
    tokens = train.micro_batch * train.seq_len // layout.cp
    unit = GROUPED_ALIGNMENT // config.precision.compute_bytes
    widths = (config.model.hidden_size, config.model.intermediate_size // layout.tp)
    moves = checkpointing.offload_activations  # by hooks that selective checkpointing and the compiler do not call
    rules = {
        "loss_chunks": tokens % train.loss_chunks != 0,
        "split_loss_chunks": train.loss_chunks > 1 and layout.splits_backward,
        "split_selective": checkpointing.name == "selective" and layout.splits_backward,
        "split_experts": config.model.num_experts > 0 and layout.splits_backward,
        "offload_selective": moves and checkpointing.name == "selective",
        "offload_compiled": moves and train.compile,
        "compiled_experts": config.model.num_experts > 0 and train.compile,
        "balanced_scaling": config.model.router_aux_loss_coef > 0 and config.precision.name == "fp16_mixed",
        "balanced_cp": config.model.router_aux_loss_coef > 0 and layout.cp_enabled,
        "balanced_chunks": config.model.routing == "balanced" and layout.cp_enabled and config.launch == "processes",
        "expert_widths": config.model.num_experts > 0 and any(width % unit for width in widths),
        "byte_vocabulary": config.data.kind == "text" and config.model.vocab_size < 256,
    }
    yield from refusals(rules, config, layout, tokens=tokens, unit=unit, tp_unit=unit * layout.tp)
    if config.model.hf_info is None:
        yield from decoder_incompatibilities(config, layout, micro_batches)
    else:
        yield from library_incompatibilities(config, layout, config.model.hf_info)
    is_whole = layout.axes_size(layout.sharding_axes) == 1
    spec = config.optimizer.spec
    rules = {
        "optimizer_foreach": not train.fused_optimizer and not any(rule.kernels for rule in spec.rules),
        "optimizer_flat": layout.uses_deepspeed_zero and spec.flat_problem != "",
        "optimizer_parts": layout.partitions_by_parameter and len(spec.rules) > 1,
        "optimizer_tp": layout.tp_enabled and spec.needs_whole,
        "optimizer_offload": layout.offload != "none" and any(rule.module != "torch.optim" for rule in spec.rules),
        "optimizer_experts": config.model.num_experts > 0 and spec.needs_whole,
        "copies": layout.zero_stage > 0 and layout.dp_replicate > 1 and is_whole,
        "virtual_stages": not pp_enabled and layout.virtual_stages > 1,
        "layers_per_stage": not pp_enabled and layout.layers_per_stage is not None,
        "sequence_chunks": train.seq_len % layout.sequence_parts != 0,
        "context_parallel": layout.context_parallel != "gather" and not layout.cp_enabled,
    }
    if config.model.adapter.is_enabled:
        yield from adapter_incompatibilities(config, layout)
    if config.precision.has_recipe:
        yield from recipe_incompatibilities(config, layout)
    if train.save != "none":
        yield from save_incompatibilities(config, layout)
    layers = list(layout.layers_per_stage or ())
    yield from refusals(rules, config, layout, layers=layers, optimizer=config.optimizer)
    if layout.secondary_shards > 1:
        yield from secondary_incompatibilities(config, layout)


def compiler_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield what this project does not run with compiled layers on any machine, and other stacks may train."""
    compiles = config.train.compile
    rules = {
        "compiled_halves": compiles and layout.splits_backward,
        "compiled_parts": compiles and config.checkpointing.name in ("selective", "attention"),
    }
    return refusals(rules, config, layout)


def decoder_incompatibilities(config: RunConfig, layout: Layout, micro_batches: int) -> Iterator[str]:
    """Yield why sequences are too long for the positions, and what tensor-parallel ranks cannot divide.

    In a pipeline, yield also why the model cannot be cut into stages, or a schedule cannot take so many micro-batches.
    """
    model, tp, seq_len = config.model, layout.tp, config.train.seq_len
    sequence_multiple, cuts_sequence = tp * layout.cp, layout.sequence_parallel
    largest_part = math.ceil(model.vocab_size / tp)  # of the vocabulary; the last rank has what is left
    rules = {
        "ep_experts": model.num_experts % layout.ep != 0,
        "ep_dense": layout.ep_enabled and not model.num_experts,
        "expert_tp": layout.tp_enabled and layout.engine == "deepspeed" and model.num_experts > 0,
        "learned_positions": model.architecture.learned_positions and seq_len > model.context_length,
        "num_attention_heads": model.num_attention_heads % tp != 0,
        "num_key_value_heads": model.num_key_value_heads % tp != 0,
        "exchanged_heads": layout.exchanges_heads and model.num_attention_heads % (tp * layout.cp) != 0,
        "intermediate_size": model.intermediate_size % tp != 0,
        "vocabulary": layout.vocabulary_parallel and (tp - 1) * largest_part >= model.vocab_size,
        "sequence_parallel": cuts_sequence and tp == 1,
        "sequence_shards": cuts_sequence and seq_len % sequence_multiple != 0,
    }
    # The number of attention heads is a multiple of the key-value heads, so that a divisor of these divides both.
    values = {
        "divisors": divisors_text(math.gcd(model.num_key_value_heads, model.intermediate_size)),
        "expert_divisors": divisors_text(model.num_experts) if model.num_experts else "1",
        "head_divisors": divisors_text(max(1, model.num_attention_heads // tp)),
        "times_cp": f" x strategy.cp={layout.cp}" if layout.cp_enabled else "",
        "sequence_multiple": sequence_multiple,
    }
    yield from refusals(rules, config, layout, **values)
    if not layout.pp_enabled:
        return
    p, schedule, round_size = layout.pp, layout.schedule, micro_batches_per_round(layout.pp, micro_batches)
    try:
        split_into_stages(model, layout)
    except UserError as error:
        yield str(error)
    takes_rounds = schedule in ("interleaved_1f1b", "zero_bubble")
    rules = {
        "plain_schedule": schedule in ("gpipe", "1f1b") and layout.virtual_stages > 1,
        "interleaved_schedule": schedule == "interleaved_1f1b" and layout.virtual_stages == 1,
        "v_stages": schedule in V_SCHEDULES and layout.virtual_stages != 2,
        "v_micro_batches": layout.is_v_shaped and p <= micro_batches < 2 * p,
        "v_tied": layout.is_v_shaped and model.tie_word_embeddings,
        "few_micro_batches": micro_batches < p,
        "micro_batch_rounds": takes_rounds and micro_batches >= p and micro_batches % (micro_batches // p) != 0,
    }
    values = {"micro_batches": micro_batches, "round_size": round_size, "batch_multiple": p * config.train.micro_batch}
    yield from refusals(rules, config, layout, **values)


def secondary_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield what secondary shards were not proven with, and why they do not divide the shards.

    torch refuses to divide tensor-parallel parameters again, and divides those along their second dimension wrongly.
    """
    shards, parts = layout.axes_size(layout.sharding_axes), layout.secondary_shards
    rules = {
        "secondary_stage": layout.zero_stage < 3,
        "secondary_axes": layout.axes_size(("tp", "cp", "pp", "ep")) > 1,
        "secondary_experts": config.model.num_experts > 0,
        "secondary_adapter": config.model.adapter.is_enabled,
        "secondary_offload": layout.offload != "none",
        "secondary_shards": shards % parts != 0 or shards == parts,
    }
    yield from refusals(rules, config, layout, shards=shards, parts=divisors_text(shards, is_proper=True))


def adapter_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield what adapters were not proven with, and matrices that the layers do not have."""
    model, names = config.model, [matrix.name for matrix in layer_matrices(config.model)]
    unknown = [name for name in config.model.adapter.target_modules or () if name not in names]
    rules = {
        "adapter_model": model.hf_info is not None or model.num_experts > 0,
        "adapter_engine": layout.engine == "accelerate" and layout.data_parallel == "fsdp",
        "adapter_pp": layout.pp_enabled,
        "adapter_tp": layout.tp_enabled and (layout.engine != "torch" or model.architecture.biases),
        "adapter_offload": layout.offload != "none" or config.checkpointing.offload_activations,
        "adapter_compile": config.train.compile,
        "adapter_optimizer": config.optimizer.name not in ("adamw", "sgd"),
        "adapter_launch": config.launch != "processes",
        "adapter_targets": len(unknown) > 0,
        "quantized_engine": model.adapter.is_quantized and layout.engine != "torch",
        "quantized_tp": model.adapter.is_quantized and layout.tp_enabled,
        "quantized_shards": model.adapter.is_quantized and config.precision.is_mixed and layout.data_parallel == "fsdp",
    }
    values = {"unknown": ", ".join(unknown), "names": ", ".join(names)}
    yield from refusals(rules, config, layout, **values)


def trains_packed(config: RunConfig, layout: Layout) -> bool:
    """Return whether runs have matrices in 4 bits as a plan has them: each rank all of them, and no width of fp16."""
    return layout.data_parallel != "fsdp" and config.precision.compute != "float16"


def recipe_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield what products of scaled matrices were not proven with, and sizes that their kernels do not take.

    torch's kernel of scaled products takes dimensions in multiples of 16 alone, the tokens of a micro-batch too, which
    the gradients of weights are summed over.
    """
    model, tokens = config.model, config.train.micro_batch * config.train.seq_len // layout.cp
    sizes = {f"{matrix.name} in {size:g}": size for matrix in layer_matrices(model) for size in matrix.cut(layout.tp)}
    uneven = [name for name, size in (sizes | {f"tokens in {tokens}": tokens}).items() if size % SCALED_MULTIPLE]
    is_sharded = layout.engine == "torch" and layout.data_parallel == "fsdp"
    is_plain = layout.axes_size(("tp", "ep")) == layout.secondary_shards == 1 and layout.offload == "none"
    rules = {
        "recipe_model": model.hf_info is not None or model.num_experts > 0,
        "recipe_adapter": model.adapter.is_enabled,
        "recipe_split": layout.splits_backward,
        "recipe_offload": layout.offload != "none" or config.checkpointing.offload_activations,
        "recipe_sizes": len(uneven) > 0,
        "float8_all_gather": config.precision.float8_all_gather and not (is_sharded and is_plain),
        "float8_save": config.precision.float8_all_gather and config.train.save != "none",
    }
    yield from refusals(rules, config, layout, uneven=", ".join(uneven))


def save_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield why no checkpoint of this run can be written, or read by a new engine."""
    is_fsdp = layout.engine == "accelerate" and layout.data_parallel == "fsdp"
    rules = {
        "save_launch": config.launch != "processes",
        "save_async": config.train.save == "async" and layout.engine != "torch",
        "save_engine": is_fsdp or layout.engine == "nn_data_parallel",
        "save_secondary": layout.engine != "torch" and layout.secondary_shards > 1,
        "save_quantized": config.model.adapter.is_quantized,
        "save_optimizer": config.optimizer.name == "adamw_8bit",
    }
    subject = "fully_shard through Accelerate" if is_fsdp else f"strategy.engine={layout.engine}"
    yield from refusals(rules, config, layout, save_subject=subject)


def library_incompatibilities(config: RunConfig, layout: Layout, info: HFModelInfo) -> Iterator[str]:
    """Yield which settings need this project's code, and what ranks cannot divide by the library's own plan."""
    model, is_cut = config.model, layout.tp_enabled
    rules = {
        "hf_offload": config.checkpointing.offload_activations,
        "hf_context": config.train.seq_len > model.context_length,
        "hf_checkpointing": config.checkpointing.name == "attention",
        "hf_saved_products": config.checkpointing.saved_products != "all",
        "hf_loss_chunks": config.train.loss_chunks > 1,
        "hf_compile": config.train.compile,
        "hf_cp": layout.cp_enabled,
        "hf_ep": layout.ep_enabled,
        "hf_pp": layout.pp_enabled,
        "hf_sequence_parallel": layout.sequence_parallel,
        "hf_no_plan": is_cut and not info.tensor_plan,
    }
    yield from refusals(rules, config, layout, model_type=info.config["model_type"])
    for path, style in info.tensor_plan.items() if is_cut else ():
        dimension, shape = SHARD_DIM.get(style), info.shapes.get(f"{path}.weight")
        size = 0 if dimension is None or shape is None else shape[dimension]
        rules = {"hf_style": style not in STYLES, "hf_dimension": size % layout.tp != 0}
        yield from refusals(rules, config, layout, path=path, style=style, dimension=dimension, size=size)
        if any(rules.values()):
            return
    divides_heads = any(style == "column" and "att" in path for path, style in info.tensor_plan.items())
    for key in ("num_attention_heads", "num_key_value_heads"):
        size = getattr(model, key)
        rules = {"hf_heads": divides_heads and size % layout.tp != 0}
        yield from refusals(rules, config, layout, key=key, size=size, divisors=divisors_text(size))
    has_whole_table = "vocabulary" not in info.tensor_plan.values()
    rules = {
        "hf_tied": is_cut and model.tie_word_embeddings and has_whole_table,
        "hf_dropout": is_cut and model.dropout > 0,
    }
    yield from refusals(rules, config, layout)
