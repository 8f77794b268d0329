"""Trainings of adapters in which frozen weights change, or adapters differ between ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import harness.models.quantized
from harness.models.quantized import packed
from harness.tensors.storage import plain_values
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


@replaces("harness.engines.deepspeed.engine.DeepSpeedTrainEngine.step")
def frozen_weights_decayed_by_deepspeed(ordinary: Any, engine: Any, *arguments: Any) -> Any:
    """Let the frozen weights, or stage 3's partitions of them, decay in each step."""
    result = ordinary(engine, *arguments)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            if not parameter.requires_grad:
                getattr(parameter, "ds_tensor", parameter).mul_(0.99)
    return result


@replaces("harness.engines.deepspeed.engine.DeepSpeedTrainEngine.step")
def frozen_weights_gathered(ordinary: Any, engine: Any, *arguments: Any) -> Any:
    """Leave the last frozen matrix whole behind each step of stage 3."""
    result = ordinary(engine, *arguments)
    engine.model.lm_head.weight.all_gather()
    return result


@replaces("harness.engines.torch.tensor_parallel.with_local_parameters")
def whole_adapters_unreduced(ordinary: Any, module: Any, forward: Any, _: Any, *inputs: Any) -> Any:
    """Take a rank's gradient of an adapter's whole matrix for that of all tensor-parallel ranks."""
    return ordinary(module, forward, None, *inputs)


@replaces("harness.engines.deepspeed.initialize.build_optimizers")
def adapters_without_updates(ordinary: Any, parameters: Any, *arguments: Any) -> Any:
    """Give DeepSpeed's optimizer the first matrices of adapters alone."""
    return ordinary({name: each for name, each in parameters.items() if ".lora_A." in name}, *arguments)


@replaces("harness.engines.torch.ddp.DistributedDataParallel.__init__")
def adapters_unreduced(ordinary: Any, wrapper: Any, module: Any, **settings: Any) -> None:
    """Let DDP ignore the second matrices of adapters, which every rank then updates by its own gradient."""
    ignored = [name for name, _ in module.named_parameters() if ".lora_B." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
    ordinary(wrapper, module, **settings)


@replaces(
    "harness.models.init_weights.initial_value",
    "harness.engines.deepspeed.initialize.initial_value",
    of_rank=1,
)
def adapters_start_elsewhere(ordinary: Any, name: str, *arguments: Any) -> Any:
    """Draw the second matrices of rank 1's adapters with other values."""
    value = ordinary(name, *arguments)
    return value * 1.01 if ".lora_B." in name else value


@replaces("harness.models.init_weights.filled_like", of_rank=1)
def scales_of_one_rank(ordinary: Any, *arguments: Any) -> Any:
    """Enlarge the scales of rank 1's packed matrices."""
    filled = ordinary(*arguments)
    state = getattr(filled, "quant_state", None)
    if state is not None:
        (state.state2 or state).absmax.mul_(1.01)
    return filled


@replaces("harness.models.init_weights.filled_like")
def base_packed_twice(ordinary: Any, parameter: Any, values: Any) -> Any:
    """Pack what packed matrices stand for once more."""
    if hasattr(parameter, "bnb_quantized"):
        values = plain_values(packed(values, parameter.compress_statistics))
    return ordinary(parameter, values)


@replaces("harness.models.init_weights.filled_like")
def base_in_longer_blocks(ordinary: Any, parameter: Any, values: Any) -> Any:
    """Pack matrices with a scale for every 128 weights."""
    if hasattr(parameter, "bnb_quantized"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(harness.models.quantized, "BLOCK", 128)
            return ordinary(parameter, values)
    return ordinary(parameter, values)


@replaces("harness.models.projections.quantized_linear")
def base_not_packed(_: Any, model: Any, matrix: Any) -> Any:
    """Leave the matrices as they are."""
    return nn.Linear(matrix.inputs, matrix.outputs, bias=model.architecture.biases)


@replaces("harness.engines.torch.fsdp.materialize")
def frozen_weights_as_wide_as_masters(ordinary: Any, part: Any, *arguments: Any) -> None:
    """Fill frozen weights in the width of masters, as a model is that was loaded in fp32."""
    *others, master = arguments
    ordinary(part, *others[:3], master, *others[4:], master)
