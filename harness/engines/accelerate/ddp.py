"""DistributedDataParallel and the optimizer through Accelerator.prepare; Accelerate's own backward and no_sync."""

from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from harness.config.schema import RunConfig
from harness.cost_model.buffers import ddp_options
from harness.engines.base import Engine
from harness.engines.torch.data_parallel import DataParallel
from harness.engines.torch.ddp import ReplicatedParams
from harness.engines.torch.engine import TorchEngine, build_adamw
from harness.engines.torch.loss_scaler import LossScaler
from harness.engines.torch.micro_batches import GradAccumulationLoop
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.probe import Probe


class AccelerateDDP(ReplicatedParams):
    """Copies whose synchronisation is put off by Accelerate's means."""

    accelerator: Accelerator

    def no_sync(self, module: DistributedDataParallel) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.accelerator.no_sync(module)
        return context


class AccelerateMicroBatches(GradAccumulationLoop):
    """Passes whose backward is Accelerate's."""

    def __init__(
        self, accelerator: Accelerator, parallel: DataParallel, probe: Probe, scale: LossScaler, loss_chunks: int
    ) -> None:
        super().__init__(parallel, probe, scale, loss_chunks)
        self.accelerator = accelerator

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)


def build(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device, probe: Probe) -> Engine:
    # No autocast and no accumulation of its own: the loop's precision and its micro-batches.
    wrapper = DistributedDataParallelKwargs(**ddp_options(config))
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[wrapper])

    def prepare(model: nn.Module) -> nn.Module:
        prepared = accelerator.prepare_model(model)
        if not isinstance(prepared, DistributedDataParallel):
            raise RuntimeError(f"Accelerate made a {type(prepared).__name__} of the model, not DistributedDataParallel")
        return prepared

    model = build_meta_model(config, probe)
    parallel = AccelerateDDP([model], config, device, prepare, layout.grad_accumulation_steps(config.train))
    parallel.accelerator = accelerator
    scale = LossScaler(config.precision, layout.dp)
    passes = AccelerateMicroBatches(accelerator, parallel, probe, scale, config.train.loss_chunks)
    engine = TorchEngine([model], config, parallel, passes, mesh, probe, scale, build_adamw(parallel, config.train))
    engine.optimizer = accelerator.prepare_optimizer(engine.optimizer)
    return engine
