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

from harness.checkpointing import model_on_meta
from harness.config import RunConfig
from harness.engines.deepspeed import held, reduces_to_owner
from harness.engines.deepspeed.shard import Names, Shard
from harness.engines.deepspeed.tensor import apply_tensor_parallel
from harness.layout import Layout
from harness.measure.probe import Probe
from harness.weights import initial_value, materialise

WORDS = {"float32": "fp32", "bfloat16": "bf16"}  # DeepSpeed's, by torch's


def settings(config: RunConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's own configuration of this run."""
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    moved = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
    offload = dict.fromkeys(moved[layout.offload], host)
    precision = config.precision
    throughout = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    narrow = dict.fromkeys(throughout, True) if precision.master == "bfloat16" else {}
    tensor = {"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}
    return tensor | {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": layout.accumulation(config.train),
        "zero_optimization": {"stage": layout.zero_stage, **offload, **config.strategy.options},
        # torch's AdamW on the host too, the same as in every engine; its kernel is as fast as DeepSpeedCPUAdam's.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision.compute == "bfloat16"} | narrow,
        "communication_data_type": WORDS[precision.reduce],  # its default is the compute width
        "data_types": {"grad_accum_dtype": WORDS[precision.accumulate]},  # its default is the compute width
        "gradient_clipping": config.train.gradient_clipping,
        "steps_per_print": None,
    }


# (model, optimizer, DeepSpeed's configuration) to a DeepSpeed engine
Initialise = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], Any]


def start(
    config: RunConfig,
    layout: Layout,
    device: torch.device,
    probe: Probe,
    initialise: Initialise | None = None,
) -> tuple[Any, Names]:
    """A DeepSpeed engine and the plain names of its parameters, from the run's initial values.

    `initialise` stands in for deepspeed.initialize where another library calls it.
    """
    deepspeed = library(device)
    with quiet():
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    model = model_on_meta(config, probe)
    dtype = getattr(torch, config.precision.compute)
    chosen = settings(config, layout, device)
    cut = apply_tensor_parallel(model, config, layout, device, dtype) if layout.tp > 1 else {}
    if layout.zero_stage == 3:
        materialise_partitioned(model, config, chosen, device, dtype)
    else:
        materialise(model, config.model, config.train.seed, device, dtype)
    names = {id(p): Shard.whole(name, getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
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
    with quiet():
        if initialise is not None:
            engine = initialise(model, optimizer, chosen)
        elif layout.zero_stage == 1 and reduces_to_owner(config):
            engine = stage_1_engine(model, optimizer, chosen)
        else:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=chosen)
    if config.precision.mixed:
        start_masters(engine.optimizer, names, config, device)
    return engine, names


def quiet() -> AbstractContextManager[Any]:
    """DeepSpeed prints what it built and the memory it sees, past its own logger; errors are raised all the same."""
    return redirect_stdout(io.StringIO())


def stage_1_engine(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: dict[str, Any]) -> Any:
    """What deepspeed.initialize makes, kept from taking BF16_Optimizer: see the package."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    class Stage1Engine(DeepSpeedEngine):  # type: ignore[misc]
        def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
            return str(ZERO_OPTIMIZATION)

    return Stage1Engine(
        args=None, model=model, optimizer=optimizer, config=chosen, config_class=DeepSpeedConfig(chosen)
    )


def library(device: torch.device) -> Any:
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


def materialise_partitioned(
    model: nn.Module, config: RunConfig, chosen: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Fills a meta model one parameter at a time, each cut to this rank's part before the next is made.

    What deepspeed.zero.Init does to a parameter but for its broadcast: every rank computes the same value.
    """
    from deepspeed.runtime.zero import Init

    context = Init(config_dict_or_path=chosen)
    for name, parameter in list(model.named_parameters()):
        whole = initial_value(name, parameter.shape, config.model, config.train.seed, device).to(dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(whole))  # type: ignore[no-untyped-call]
        context._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
    if context.mem_efficient_linear:
        context._enable_mem_efficient_linear()  # else autograd would keep every gathered weight until backward


@torch.no_grad()
def start_masters(optimizer: Any, names: Names, config: RunConfig, device: torch.device) -> None:
    """Masters from the fp32 initial values; DeepSpeed made them of the compute weights, which are rounded."""
    shapes = {shard.name: torch.Size(shard.shape) for shard in names.values()}
    for piece in held.masters(optimizer, names):
        whole = initial_value(piece.name, shapes[piece.name], config.model, config.train.seed, device)
        part = whole.view(piece.shape)[tuple(slice(*edges) for edges in piece.box)]
        piece.local.copy_(part.reshape(piece.local.shape))
