"""The memory of a model whose layers have no formulas: that of the nearest decoder that has. Imports no torch."""

import dataclasses
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.memory import MemoryEstimate, estimate_memory
from harness.cost_model.sharding import local_parameter_count
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import whole_model
from harness.layout.state_widths import StateWidths

GATED_MATRICES = 3  # of an MLP with a gate: gate, up and down


def predicted_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> MemoryEstimate:
    """Return the memory of a model; of a traced one its state as it is, all else as in the nearest decoder."""
    near = estimate_memory(of_decoder(config), layout, widths, device)
    if model_profile(config.model).is_project_decoder:
        return near
    total = local_parameter_count(config.model, whole_model(config.model), layout.tp, layout.vocabulary_tp)
    nearest = nearest_decoder(config.model)
    ratio = total / local_parameter_count(nearest, whole_model(nearest), layout.tp, layout.vocabulary_tp)
    state = {
        kind: -(-width * total // layout.shard_count(kind))
        for kind, width in (
            ("parameters", widths.parameters),
            ("gradients", widths.gradients),
            ("optimizer", widths.optimizer),
        )
    }
    at_peak = {part: round(size * ratio) if part in state else size for part, size in near.at_peak.items()}
    return dataclasses.replace(
        near,
        parameter_bytes=state["parameters"],
        gradient_bytes=state["gradients"],
        optimizer_bytes=state["optimizer"],
        host_bytes=round(near.host_bytes * ratio),
        at_peak=at_peak,
    )


def of_decoder(config: RunConfig) -> RunConfig:
    """Return the configuration with a model whose activations are known: its own, or the nearest to a traced one."""
    if model_profile(config.model).is_project_decoder:
        return config
    return dataclasses.replace(config, model=nearest_decoder(config.model))


@lru_cache(maxsize=64)
def nearest_decoder(model: ModelConfig) -> ModelConfig:
    """Return the decoder of this project whose layers are nearest to a traced model's."""
    profile = model_profile(model)
    inner = [
        name
        for name, shape in profile.parameter_shapes.items()
        if len(shape) == 2 and profile.layer_index(name) == 0 and model.intermediate_size in shape
    ]
    family = "llama" if len(inner) >= GATED_MATRICES else "gpt"
    heads = model.num_attention_heads
    unit = 1 if family == "gpt" else 2
    while model.hidden_size % (unit * heads):  # heads of a size that the hidden one is no multiple of
        heads -= 1
    groups = max(size for size in range(1, min(model.num_key_value_heads, heads) + 1) if heads % size == 0)
    return dataclasses.replace(
        model,
        family=family,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        dropout=model.dropout if family == "gpt" else 0.0,
        path=None,
        hf_info=None,
    )
