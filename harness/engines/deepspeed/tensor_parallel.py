"""Tensor parallelism by DeepSpeed's own layers (AutoTP): attention and MLP are cut, embedding and head stay whole.

Read in DeepSpeed 0.19.8 (module_inject/layers.py, utils/groups.py). Its mesh is (data, tensor), tensor innermost, as
ours. A column-parallel layer sums the gradient of its input, a row-parallel one its output. AutoTP would find the
layers by their names; here the plan beside the model names them, so that each weight is cut as soon as it is made.
"""

import torch
from torch import nn

from harness.config.schema import RunConfig
from harness.engines.deepspeed.shards import ParamSlices, ParamSlice
from harness.layout.layout import Layout
from harness.layout.partition import SHARD_DIM, tp_style
from harness.models.decoder import Decoder
from harness.models.init_weights import initial_value


def apply_tensor_parallel(
    model: Decoder, config: RunConfig, layout: Layout, device: torch.device, dtype: torch.dtype
) -> ParamSlices:
    """Puts DeepSpeed's layers in the place of a meta model's matrices, one after another, with this rank's part of
    their initial values.

    Returns what their parameters are parts of. Needs DeepSpeed's communication started.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(layout.tp)
    group, place = groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_rank()
    layers = {"column": LinearLayer, "row": LinearAllreduce}
    meta = AutoTPMeta.from_model_config(config.model)
    names: ParamSlices = {}
    for path, module in list(model.named_modules()):
        cut = tp_style(path, config.model)
        if cut not in layers:
            continue
        assert isinstance(module, nn.Linear)
        name = f"{path}.weight"
        shape = tuple(module.weight.shape)
        value = initial_value(name, module.weight.shape, config.model, config.train.seed, device)
        module.weight = nn.Parameter(value.to(dtype))
        made = layers[cut](module, group, name=path, tp_meta=meta)
        model.set_submodule(path, made)
        dimension = SHARD_DIM[cut]
        size = made.weight.shape[dimension]
        box = [(0, whole) for whole in shape]
        box[dimension] = (place * size, (place + 1) * size)
        names[id(made.weight)] = ParamSlice(name, shape, tuple(box))
    model.ds_autotp_parsed = True  # type: ignore[assignment]  # AutoTP has nothing left to do
    return names
