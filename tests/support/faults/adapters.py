"""Trainings of adapters in which frozen weights change, or adapters differ between ranks."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.plant import replaces


@replaces("harness.models.build.add_adapters")
def frozen_weight_trained(ordinary: Any, decoder: Any) -> Any:
    """Train a matrix of each layer beside its adapters."""
    adapted = ordinary(decoder)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("q_proj.base_layer.weight"))
    return adapted


@replaces(
    "harness.engines.torch.ddp.ReplicatedParams.sync_model_params",
    "harness.engines.torch.fsdp.FSDPParams.sync_model_params",
)
def frozen_weights_decayed(ordinary: Any, parallel: Any) -> None:
    """Let the frozen weights decay in each step."""
    with torch.no_grad():
        for parameter in parallel.parameters.values():
            if not parameter.requires_grad:
                parameter.mul_(0.99)
    ordinary(parallel)


@replaces("harness.engines.torch.ddp.DistributedDataParallel.__init__")
def adapters_unreduced(ordinary: Any, wrapper: Any, module: Any, **settings: Any) -> None:
    """Let DDP ignore the second matrices of adapters, which every rank then updates by its own gradient."""
    ignored = [name for name, _ in module.named_parameters() if ".lora_B." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
    ordinary(wrapper, module, **settings)


@replaces("harness.models.init_weights.initial_value", of_rank=1)
def adapters_start_elsewhere(ordinary: Any, name: str, *arguments: Any) -> Any:
    """Draw the second matrices of rank 1's adapters with other values."""
    value = ordinary(name, *arguments)
    return value * 1.01 if ".lora_B." in name else value
