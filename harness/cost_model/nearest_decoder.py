"""The memory of a model whose layers have no formulas: that of the nearest decoder that has. Imports no torch."""

import dataclasses
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.memory import MemoryEstimate, estimate_memory
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import STATE_KINDS, StateWidths

GATED_MATRICES = 3  # of an MLP with a gate: gate, up and down


def predicted_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> MemoryEstimate:
    """Return the memory of a model; of a traced one its state as it is, all else as in the nearest decoder."""
    if model_profile(config.model).is_project_decoder:
        return estimate_memory(config, layout, widths, device)
    near = estimate_memory(dataclasses.replace(config, model=nearest_decoder(config.model)), layout, widths, device)
    own = estimate_memory(config, layout, widths, device)  # of its state
    ratio = own.parameter_bytes / near.parameter_bytes
    return dataclasses.replace(
        near,
        parameter_bytes=own.parameter_bytes,
        gradient_bytes=own.gradient_bytes,
        optimizer_bytes=own.optimizer_bytes,
        host_bytes=round(near.host_bytes * ratio),
        at_peak={part: round(size * ratio) if part in STATE_KINDS else size for part, size in near.at_peak.items()},
    )


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
