"""The columns of a row that are known before anything runs. Imports no torch."""

from harness.config.schema import RunConfig
from harness.config.strategy import DEGREES
from harness.layout.layout import Layout
from harness.layout.model_profile import parameter_count
from harness.layout.partition import split_into_stages
from harness.records.schema import Cells


def config_columns(config: RunConfig, layout: Layout | None) -> Cells:
    """Return the columns that a configuration determines; without a layout there are no degrees."""
    row: Cells = {
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "attention": config.model.attention,
        "dropout": config.model.dropout,
        "strategy": config.strategy.name,
        "engine": config.strategy.engine,
        "data_parallel": config.strategy.data_parallel,
        "checkpointing": config.checkpointing.name,
        "offload": config.strategy.offload,
        "offload_activations": config.checkpointing.offload_activations,
        "precision": config.precision.name,
        "zero_stage": config.strategy.zero_stage,
        "micro_batch": config.train.micro_batch,
        "global_batch": config.train.global_batch,
        "seq_len": config.train.seq_len,
        "loss_chunks": config.train.loss_chunks,
        "compile": config.train.compile,
        "fused_optimizer": config.train.fused_optimizer,
        "checkpointing_every": config.checkpointing.every if config.checkpointing.every > 1 else None,
        "saved_products": config.checkpointing.saved_products if config.checkpointing.saved_products != "all" else None,
        "repeat": config.repeat,
        "launch": config.launch,
    }
    if layout is not None:
        row |= {degree: getattr(layout, degree) for degree in ("world_size", *DEGREES)}
        row["grad_accumulation"] = layout.grad_accumulation_steps(config.train)
        if layout.pp_enabled:
            layers = [str(stage.layers) for stage in split_into_stages(config.model, layout)]
            row |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
            row["layers_per_stage"] = "-".join(layers)
        if layout.tp_enabled:
            row["sequence_parallel"] = layout.sequence_parallel
            row["vocabulary_parallel"] = layout.vocabulary_parallel
    return row
