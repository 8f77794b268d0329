"""The columns of a row that are known before anything runs. Imports no torch."""

from operator import attrgetter

from harness.config.schema import RunConfig
from harness.config.strategy import DEGREES
from harness.layout.layout import Layout
from harness.layout.model_profile import active_parameter_count, parameter_count, trained_parameter_count
from harness.layout.partition import split_into_stages
from harness.records.schema import Cells

_KEYS = {  # of columns that have a key's value
    "attention": "model.attention",
    "dropout": "model.dropout",
    "strategy": "strategy.name",
    "engine": "strategy.engine",
    "data_parallel": "strategy.data_parallel",
    "checkpointing": "checkpointing.name",
    "offload": "strategy.offload",
    "offload_activations": "checkpointing.offload_activations",
    "precision": "precision.name",
    "zero_stage": "strategy.zero_stage",
    "micro_batch": "train.micro_batch",
    "global_batch": "train.global_batch",
    "seq_len": "train.seq_len",
    "loss_chunks": "train.loss_chunks",
    "compile": "train.compile",
    "optimizer": "optimizer.name",
    "fused_optimizer": "train.fused_optimizer",
}


def config_columns(config: RunConfig, layout: Layout | None) -> Cells:
    """Return the columns that a configuration determines; without a layout there are no degrees."""
    every, products = config.checkpointing.every, config.checkpointing.saved_products
    row: Cells = {
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        **{column: attrgetter(key)(config) for column, key in _KEYS.items()},
        "checkpointing_every": every if every > 1 else None,
        "saved_products": products if products != "all" else None,
        "repeat": config.repeat,
        "launch": config.launch,
    }
    if config.precision.has_recipe:
        row |= {"recipe": config.precision.recipe, "float8_all_gather": config.precision.float8_all_gather or None}
    if config.train.save != "none":
        row["save"] = config.train.save
    if config.model.adapter.is_enabled:
        trained = trained_parameter_count(config.model)
        row |= {"adapter": config.model.adapter.name, "adapter_rank": config.model.adapter.r}
        row |= {"trained_parameters": trained, "frozen_parameters": parameter_count(config.model) - trained}
    if config.model.num_experts:
        row |= {"active_parameters": active_parameter_count(config.model), "routing": config.model.routing}
    if layout is not None:
        degrees = (degree for degree in DEGREES if degree != "ep" or config.model.num_experts)
        row |= {degree: getattr(layout, degree) for degree in ("world_size", *degrees)}
        row |= {"secondary_shards": layout.secondary_shards} if layout.secondary_shards > 1 else {}
        row["grad_accumulation"] = layout.grad_accumulation_steps(config.train)
        if layout.exchanges_heads:
            row["context_parallel"] = layout.context_parallel
        if layout.pp_enabled:
            layers = [str(stage.layers) for stage in split_into_stages(config.model, layout)]
            row |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
            row["layers_per_stage"] = "-".join(layers)
        if layout.tp_enabled:
            row["sequence_parallel"] = layout.sequence_parallel
            row["vocabulary_parallel"] = layout.vocabulary_parallel
    return row
