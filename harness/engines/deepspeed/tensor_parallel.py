"""Tensor parallelism by DeepSpeed's own layers (AutoTP), which shards attention and MLP but not embedding and head.

This follows the source of DeepSpeed 0.19.8 (module_inject/layers.py, utils/groups.py). Its mesh is (data, tensor),
tensor innermost, like ours. A column-parallel layer sums the gradient of its input, a row-parallel one its output.
AutoTP would find the layers by their names; here harness.layout.layer_spec names them, so that each weight is sharded
as soon as it is created.
"""

import torch
from torch import nn

from harness.config.schema import RunConfig
from harness.engines.deepspeed.shards import ParamSlice, ParamSlices
from harness.layout.layer_spec import SHARD_DIM
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.models.decoder import Decoder
from harness.models.init_weights import initial_value


def apply_tensor_parallel(
    model: Decoder, config: RunConfig, layout: Layout, device: torch.device, dtype: torch.dtype
) -> ParamSlices:
    """Replace a meta model's matrices by DeepSpeed's layers, one after another, with this rank's initial values.

    Return the slices of the plain model that the layers' parameters hold. Initialize DeepSpeed's communication first.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(layout.tp)
    group, tp_rank = groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_rank()
    layers = {"column": LinearLayer, "row": LinearAllreduce}
    meta = AutoTPMeta.from_model_config(config.model)
    param_slices: ParamSlices = {}
    profile = model_profile(config.model)
    for path, module in list(model.named_modules()):
        style = profile.tensor_plan.get(path)
        if style not in layers:
            continue
        assert isinstance(module, nn.Linear)
        name = f"{path}.weight"
        shape = tuple(module.weight.shape)
        value = initial_value(name, module.weight.shape, config.model, config.train.seed, device)
        module.weight = nn.Parameter(value.to(dtype))
        sharded = layers[style](module, group, name=path, tp_meta=meta)
        model.set_submodule(path, sharded)
        dimension = SHARD_DIM[style]
        size = sharded.weight.shape[dimension]
        box = [(0, whole) for whole in shape]
        box[dimension] = (tp_rank * size, (tp_rank + 1) * size)
        param_slices[id(sharded.weight)] = ParamSlice(name, shape, tuple(box))
    model.ds_autotp_parsed = True  # type: ignore[assignment]  # so that AutoTP leaves the model alone
    return param_slices
