"""The construction of a run's model on the meta device, and the transforms that are applied to it."""

import sys

import torch

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layer_spec import layer_matrices
from harness.layout.layout import Layout
from harness.layout.partition import Stage, balancing_weight, whole_model
from harness.models.activation_checkpoint import apply_checkpointing, apply_loss_chunks
from harness.models.activation_offload import offload_activations
from harness.models.decoder import Decoder
from harness.models.float8 import convert_projections
from harness.probe import Probe


def build_model(model: ModelConfig, stage: Stage | None = None) -> Decoder:
    """Return the model, or a stage of it, on the meta device; harness.models.init_weights gives it its weights."""
    if model.hf_info is not None:
        from harness.models import hf_library

        return hf_library.build_hf_model(model, model.hf_info)  # type: ignore[return-value]
    with torch.device("meta"):
        decoder = Decoder(model, stage or whole_model(model))
        return add_adapters(decoder) if model.adapter.is_enabled else decoder


def build_part(config: RunConfig, device: torch.device, stage: Stage | None = None) -> Decoder:
    """Return the model, or a stage of it, on the meta device, whose projections multiply as the precision says."""
    model = build_model(config.model, stage)
    if config.precision.has_recipe:
        convert_projections(model, config.precision, device)
    return model


def add_adapters(decoder: Decoder) -> Decoder:
    """Freeze a model on the meta device and give its layers' matrices adapters, in place, by the library peft."""
    from peft import LoraConfig, inject_adapter_in_model

    names = [matrix.name for matrix in layer_matrices(decoder.config) if matrix.rank]
    adapter = decoder.config.adapter
    decoder.is_loaded_in_4bit = adapter.is_quantized  # type: ignore[assignment]  # peft asks for it
    lora = LoraConfig(r=adapter.r, lora_alpha=adapter.lora_alpha, target_modules=names, lora_dropout=0.0)
    return inject_adapter_in_model(lora, decoder)  # type: ignore[arg-type, return-value]


def build_meta_model(config: RunConfig, layout: Layout, device: torch.device, probe: Probe) -> Decoder:
    """Return the run's whole model on the meta device for training on `device`, with all transforms applied."""
    model = build_part(config, device)
    apply_model_transforms(model, config, layout, probe)
    return model


def apply_model_transforms(model: Decoder, config: RunConfig, layout: Layout, probe: Probe) -> None:
    """Apply compile, checkpointing, activation offload and loss chunks in place, each around those before it.

    Experts announce to the probe how many tokens they have.
    """
    if config.model.num_experts:
        model.listen_to_routers(probe.routed)
    if config.model.router_aux_loss_coef:
        model.balance_experts(balancing_weight(config, layout))
    if config.train.compile:
        apply_compile(model, config.precision.has_recipe)
    apply_checkpointing(model, config.checkpointing, probe)
    if config.checkpointing.offload_activations:
        offload_activations(model, probe)
    apply_loss_chunks(model, config.train.loss_chunks, probe)


def apply_compile(model: Decoder, is_scaled: bool) -> None:
    """Compile the forward of every decoder layer in place; later wrappers, such as checkpointing, stay outside.

    Where products are scaled, the compiler rounds wherever single operators would, as torchtitan has it for scales of
    rows (pytorch/pytorch#150859): scales and casts to float8 amplify what a rounding changes.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # a pool of processes would outlive the compilation and disturb the timed steps
    inductor.emulate_precision_casts = is_scaled
    for block in model.layers_by_index().values():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]


def compiled_graph_count() -> int:
    """Return the number of graphs compiled so far in this process, without importing the compiler."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])


def compile_seconds() -> float:
    """Return the seconds that compiling has taken so far in this process, without importing the compiler."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0.0 if compiler is None else float(compiler.calculate_time_spent()["total_wall_time"])
