"""From initial values to a DeepSpeed engine; in stage 3 no rank holds more than its share and one parameter."""

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
from harness.engines.deepspeed.shards import ParamSlices, ParamSlice
from harness.engines.deepspeed.tensor_parallel import apply_tensor_parallel
from harness.engines.deepspeed.widths import reduces_to_owner_rank
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.models.init_weights import initial_value, materialize
from harness.probe import Probe

# (model, optimizer, DeepSpeed's configuration) to a DeepSpeed engine
Initialize = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], Any]


def build_engine(
    config: RunConfig,
    layout: Layout,
    device: torch.device,
    probe: Probe,
    initialize: Initialize | None = None,
) -> tuple[Any, ParamSlices]:
    """A DeepSpeed engine and the plain names of its parameters, from the run's initial values.

    `initialise` stands in for deepspeed.initialize where another library calls it.
    """
    deepspeed = import_deepspeed(device)
    with suppress_stdout():
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    model = build_meta_model(config, probe)
    dtype = getattr(torch, config.precision.compute)
    ds_config = deepspeed_config(config, layout, device)
    cut = apply_tensor_parallel(model, config, layout, device, dtype) if layout.tp > 1 else {}
    if layout.zero_stage == 3:
        materialize_partitioned(model, config, ds_config, device, dtype)
    else:
        materialize(model, config.model, config.train.seed, device, dtype)
    names = {id(p): ParamSlice.whole(name, getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    names |= cut
    train = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=train.fused_optimizer,
        foreach=not train.fused_optimizer,
    )
    with suppress_stdout():
        if initialize is not None:
            engine = initialize(model, optimizer, ds_config)
        elif layout.zero_stage == 1 and reduces_to_owner_rank(config):
            engine = build_stage_1_engine(model, optimizer, ds_config)
        else:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    if config.precision.is_mixed:
        init_master_weights(engine.optimizer, names, config, device)
    return engine, names


def suppress_stdout() -> AbstractContextManager[Any]:
    """DeepSpeed prints what it built and the memory it sees, past its own logger; errors are raised all the same."""
    return redirect_stdout(io.StringIO())


def build_stage_1_engine(model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: dict[str, Any]) -> Any:
    """What deepspeed.initialize makes, kept from taking BF16_Optimizer: see the package."""
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
    """DeepSpeed, told through its own environment variables which device this rank has.

    Left alone it takes a GPU wherever it sees one, and it will not start without LOCAL_RANK.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_RANK", "0")
    # torch 2.13 renames collectives that DeepSpeed calls: a warning a call, for its authors.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return importlib.import_module("deepspeed")


def materialize_partitioned(
    model: nn.Module, config: RunConfig, ds_config: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Fills a meta model one parameter at a time, each cut to this rank's part before the next is made.

    What deepspeed.zero.Init does to a parameter but for its broadcast: every rank computes the same value.
    """
    from deepspeed.runtime.zero import Init

    context = Init(config_dict_or_path=ds_config)
    for name, parameter in list(model.named_parameters()):
        whole = initial_value(name, parameter.shape, config.model, config.train.seed, device).to(dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(whole))  # type: ignore[no-untyped-call]
        context._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
    if context.mem_efficient_linear:
        context._enable_mem_efficient_linear()  # else autograd would keep every gathered weight until backward


@torch.no_grad()
def init_master_weights(optimizer: Any, names: ParamSlices, config: RunConfig, device: torch.device) -> None:
    """Masters from the fp32 initial values; DeepSpeed made them of the compute weights, which are rounded."""
    shapes = {shard.name: torch.Size(shard.shape) for shard in names.values()}
    for piece in state.master_shards(optimizer, names):
        whole = initial_value(piece.name, shapes[piece.name], config.model, config.train.seed, device)
        part = whole.view(piece.shape)[tuple(slice(*edges) for edges in piece.box)]
        piece.local.copy_(part.reshape(piece.local.shape))
