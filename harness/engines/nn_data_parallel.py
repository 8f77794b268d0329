"""nn.DataParallel: one process drives every GPU of the machine with a thread each, copying the model every step."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.base import Engine
from harness.layout.state_widths import StateWidths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout
    from harness.probe import Probe


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    if machine.device != "cuda" or machine.devices < 2:
        found = machine.devices if machine.device == "cuda" else 0
        yield f"strategy={config.strategy.name} needs two CUDA devices, {found} are used: choose strategy=ddp"
    elif config.train.micro_batch % machine.devices:
        yield (
            f"train.micro_batch={config.train.micro_batch} is scattered over {machine.devices} devices:"
            f" choose a multiple of {machine.devices}"
        )
    if config.checkpointing.name != "none":
        name = config.checkpointing.name
        yield f"checkpointing={name} does not survive the copies nn.DataParallel makes: choose checkpointing=none"
    if config.train.loss_chunks > 1:
        yield f"train.loss_chunks={config.train.loss_chunks} is not supported by nn.DataParallel: choose 1"
    if config.train.compile:
        yield "train.compile=true does not survive the copies nn.DataParallel makes: choose false"
    if config.checkpointing.offload_activations:
        yield "checkpointing.offload_activations=true does not survive the copies nn.DataParallel makes: choose false"
    if layout.world_size > 1:
        yield f"strategy={config.strategy.name} is one process: choose 1 for every degree of the strategy"
    if layout.offload != "none":
        yield f"strategy.offload={layout.offload} is not part of nn.DataParallel: choose none"
    if config.model.dropout:
        yield f"model.dropout={config.model.dropout} would drop alike on all devices of nn.DataParallel: choose 0"
    if config.precision.is_mixed:
        yield f"precision={config.precision.name} would be reduced in 16 bits by nn.DataParallel: choose precision=fp32"


def rank_environment(layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]:
    return {}


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    from harness.engines.torch import state_widths as torch_widths

    return torch_widths(config, layout)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    from torch import nn

    from harness.engines.torch.ddp import ReplicatedParams
    from harness.engines.torch.engine import TorchEngine, build_adamw
    from harness.engines.torch.loss_scaler import LossScaler
    from harness.engines.torch.micro_batches import GradAccumulationLoop
    from harness.models.build import build_meta_model

    model = build_meta_model(config, probe)
    parallel = ReplicatedParams([model], config, device, nn.DataParallel)
    scale = LossScaler(config.precision, layout.dp)
    passes = GradAccumulationLoop(parallel, probe, scale, config.train.loss_chunks)
    engine = TorchEngine([model], config, parallel, passes, mesh, probe, scale, build_adamw(parallel, config.train))
    engine.devices = torch.cuda.device_count()
    return engine
