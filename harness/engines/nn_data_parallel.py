"""The engine around nn.DataParallel: one process drives all GPUs by threads and copies the model in every step."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from harness.engines.base import Engine, device_count
from harness.layout.state_widths import StateWidths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout
    from harness.probe import Probe


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Yield every reason why nn.DataParallel cannot train this run."""
    count = device_count(config, layout, machine) if machine.device == "cuda" else 0
    if count < 2:
        yield f"strategy={config.strategy.name} needs two CUDA devices, {count} are used: choose strategy=ddp"
    elif config.train.micro_batch % count:
        yield (
            f"train.micro_batch={config.train.micro_batch} is scattered over {count} devices: choose a multiple of"
            f" {count}"
        )
    if config.checkpointing.name != "none":
        yield (
            f"checkpointing={config.checkpointing.name} is lost when nn.DataParallel copies the model: choose"
            " checkpointing=none"
        )
    if config.train.loss_chunks > 1:
        yield f"train.loss_chunks={config.train.loss_chunks} is not supported by nn.DataParallel: choose 1"
    if config.train.compile:
        yield "train.compile=true is lost when nn.DataParallel copies the model: choose false"
    if config.checkpointing.offload_activations:
        yield "checkpointing.offload_activations=true is lost when nn.DataParallel copies the model: choose false"
    if layout.world_size > 1:
        yield f"strategy={config.strategy.name} runs in one process: choose 1 for every degree of the strategy"
    if layout.offload != "none":
        yield f"strategy.offload={layout.offload} is not supported by nn.DataParallel: choose none"
    if config.model.dropout:
        yield (
            f"model.dropout={config.model.dropout} would draw the same masks on all devices of nn.DataParallel:"
            " choose 0"
        )
    if config.precision.is_mixed:
        yield (
            f"precision={config.precision.name}: nn.DataParallel would reduce gradients in 16 bits;"
            " choose precision=fp32"
        )


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    """Return the torch engine's widths, because nn.DataParallel copies that engine's model."""
    from harness.engines.torch import state_widths as torch_widths

    return torch_widths(config, layout)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """Build the torch engine around a model that nn.DataParallel wraps."""
    import torch
    from torch import nn

    from harness.engines.torch.ddp import ReplicatedParams
    from harness.engines.torch.engine import whole_model_engine
    from harness.models.build import build_meta_model

    model = build_meta_model(config, layout, device, probe)
    count = config.world_size or config.cluster.gpus_per_node or torch.cuda.device_count()
    wrap = partial(nn.DataParallel, device_ids=list(range(count)) if device.type == "cuda" else None)
    parallel = ReplicatedParams([model], config, device, wrap)
    engine = whole_model_engine(model, config, layout, mesh, probe, parallel)
    engine.devices = count if device.type == "cuda" else 0
    return engine
