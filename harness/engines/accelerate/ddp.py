"""DistributedDataParallel and the optimizer by Accelerator.prepare, with Accelerate's own backward and no_sync."""

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from harness.config.schema import RunConfig
from harness.engines.accelerate.checkpoint import AcceleratedCheckpoint
from harness.engines.base import Engine
from harness.engines.torch.ddp import ReplicatedParams
from harness.engines.torch.engine import whole_model_engine
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.probe import Probe


def build(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device, probe: Probe) -> Engine:
    """Build a TorchEngine around what Accelerate prepares; raise RuntimeError if that is not DDP."""
    # Accelerate applies no autocast and no accumulation, because the training loop of this engine does.
    wrapper = DistributedDataParallelKwargs(**config.strategy.ddp_options)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[wrapper])

    def prepare(model: nn.Module) -> nn.Module:
        prepared = accelerator.prepare_model(model)
        if not isinstance(prepared, DistributedDataParallel):
            raise RuntimeError(
                f"Accelerator.prepare returned a {type(prepared).__name__} instead of a DistributedDataParallel"
            )
        return prepared

    model = build_meta_model(config, layout, device, probe)
    accumulation = layout.grad_accumulation_steps(config.train)
    parallel = ReplicatedParams([model], config, device, prepare, accumulation, accelerator.no_sync)
    engine = whole_model_engine(model, config, layout, mesh, probe, parallel, accelerator)
    engine.make_checkpoint = partial(AcceleratedCheckpoint, accelerator)
    return engine
