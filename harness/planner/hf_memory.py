"""The memory of a traced Hugging Face model: its own state, and activations of the nearest layer with formulas.

A trace has every parameter, but not what backward keeps. That is predicted for a decoder of this project of the same
sizes: with a gated MLP and RMSNorm where the model's MLP has three matrices, otherwise with a plain MLP, biases and
LayerNorm. Left out is what the library's layers keep beyond those.
"""

import dataclasses
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.memory import MemoryEstimate, estimate_memory
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import StateWidths

GATED_MATRICES = 3  # of an MLP with a gate: gate, up and down


def traced_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> MemoryEstimate:
    """Return the memory of a traced model: its state as it is, everything else as in the nearest decoder."""
    own = estimate_memory(config, layout, widths, device)
    near = estimate_memory(nearest_run(config), layout, widths, device)
    at_peak = dict(near.at_peak)
    state = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}
    for part, name in state.items():
        if part in at_peak and getattr(near, name):
            at_peak[part] = round(at_peak[part] * getattr(own, name) / getattr(near, name))
    return dataclasses.replace(
        near,
        parameter_bytes=own.parameter_bytes,
        gradient_bytes=own.gradient_bytes,
        optimizer_bytes=own.optimizer_bytes,
        host_bytes=own.host_bytes,
        at_peak=at_peak,
    )


def nearest_run(config: RunConfig) -> RunConfig:
    """Return the configuration with the decoder that is nearest to its traced model."""
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
