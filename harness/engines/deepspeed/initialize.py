"""The construction of a DeepSpeed engine; a stage-3 rank never holds more than its shards and one whole parameter."""

import importlib
import io
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.config.schema import RunConfig
from harness.engines.deepspeed import state
from harness.engines.deepspeed.config import deepspeed_config
from harness.engines.deepspeed.shards import ParamSlice, ParamSlices
from harness.engines.deepspeed.tensor_parallel import apply_tensor_parallel
from harness.engines.deepspeed.widths import reduces_to_owner_rank
from harness.engines.torch.optimizer import build_optimizers
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.models.init_weights import initial_value, materialize
from harness.probe import Probe

# Takes (model, optimizer, DeepSpeed's configuration) and returns a DeepSpeed engine.
Initialize = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], Any]

# DeepSpeed's collective for inference on a CPU. By default every rank compiles it when the communication starts, for
# about a minute. Training never calls it: layers and kernels for inference do (TorchBackend in comm/torch.py).
INFERENCE_COLLECTIVE = "deepspeed_shm_comm"


def build_engine(
    config: RunConfig,
    layout: Layout,
    device: torch.device,
    probe: Probe,
    initialize: Initialize | None = None,
) -> tuple[Any, ParamSlices]:
    """Return a DeepSpeed engine with the run's initial values, and the slices of the plain model that it holds.

    `initialize` replaces deepspeed.initialize where another library calls it.
    """
    deepspeed = import_deepspeed(device)
    with suppress_stdout():
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    model = build_meta_model(config, layout, device, probe)
    dtype = getattr(torch, config.precision.compute)
    ds_config = deepspeed_config(config, layout, device)
    tp_slices = apply_tensor_parallel(model, config, layout, device, dtype) if layout.tp_enabled else {}
    if layout.zero_stage == 3:
        materialize_partitioned(model, config, ds_config, device, dtype)
    else:
        materialize(model, config.model, config.train.seed, device, dtype)
    param_slices = {
        id(parameter): ParamSlice.whole(name, getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
    }
    param_slices |= tp_slices
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    [optimizer] = build_optimizers(trained, config)
    with suppress_stdout():
        if initialize is not None:
            engine = initialize(model, optimizer, ds_config)
        elif layout.zero_stage == 1 and reduces_to_owner_rank(config):
            engine = build_stage_1_engine(model, optimizer, ds_config)
        else:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    if config.precision.is_mixed:
        init_master_weights(engine.optimizer, param_slices, config, device)
    return engine, param_slices


def suppress_stdout() -> AbstractContextManager[Any]:
    """Return a context that discards what DeepSpeed prints without its own logger; errors are still raised."""
    return redirect_stdout(io.StringIO())


def build_stage_1_engine(model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: dict[str, Any]) -> Any:
    """Return the engine of deepspeed.initialize, but without BF16_Optimizer; see the package's docstring."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    class Stage1Engine(DeepSpeedEngine):  # type: ignore[misc]
        def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
            return str(ZERO_OPTIMIZATION)

    return Stage1Engine(
        args=None, model=model, optimizer=optimizer, config=ds_config, config_class=DeepSpeedConfig(ds_config)
    )


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed after setting its environment variables for this rank's device.

    By default it uses a GPU wherever it sees one, and it does not start without LOCAL_RANK.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_RANK", "0")
    # torch 2.13 renames collectives that DeepSpeed calls, and warns at every call; only DeepSpeed can change that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed = importlib.import_module("deepspeed")
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__[INFERENCE_COLLECTIVE] = False
    return deepspeed


def materialize_partitioned(
    model: nn.Module, config: RunConfig, ds_config: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Fill a meta model one parameter at a time, each partitioned before the next is computed.

    This does to a parameter what deepspeed.zero.Init does, except its broadcast: every rank computes the same value.
    """
    from deepspeed.runtime.zero import Init

    context = Init(config_dict_or_path=ds_config)
    for name, parameter in list(model.named_parameters()):
        whole = initial_value(name, parameter.shape, config.model, config.train.seed, device).to(dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(whole, parameter.requires_grad))  # type: ignore[no-untyped-call]
        context._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
    if context.mem_efficient_linear:
        context._enable_mem_efficient_linear()  # else autograd would keep every gathered weight until backward


@torch.no_grad()
def init_master_weights(optimizer: Any, param_slices: ParamSlices, config: RunConfig, device: torch.device) -> None:
    """Set the master weights to the fp32 initial values, because DeepSpeed copied them from rounded compute weights."""
    shapes = {param_slice.name: torch.Size(param_slice.shape) for param_slice in param_slices.values()}
    for shard in state.master_shards(optimizer, param_slices):
        whole = initial_value(shard.name, shapes[shard.name], config.model, config.train.seed, device)
        part = whole.view(shard.shape)[tuple(slice(*edges) for edges in shard.box)]
        shard.local.copy_(part.reshape(shard.local.shape))
