"""DistributedDataParallel and the optimizer by Accelerator.prepare, with Accelerate's own backward and no_sync."""

from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from harness.config.schema import RunConfig
from harness.engines.base import Engine
from harness.engines.torch.data_parallel import DataParallel, master_params
from harness.engines.torch.ddp import ReplicatedParams
from harness.engines.torch.engine import TorchEngine
from harness.engines.torch.loss_scaler import LossScaler
from harness.engines.torch.micro_batches import GradAccumulationLoop
from harness.engines.torch.optimizer import build_optimizer
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.probe import Probe


class AccelerateDDP(ReplicatedParams):
    """Replicated parameters whose gradient synchronization Accelerator.no_sync postpones."""

    accelerator: Accelerator

    def no_sync(self, module: DistributedDataParallel) -> AbstractContextManager[None]:
        """Return Accelerate's context in which gradients are not synchronized."""
        context: AbstractContextManager[None] = self.accelerator.no_sync(module)
        return context


class AccelerateMicroBatches(GradAccumulationLoop):
    """A GradAccumulationLoop whose backward is Accelerate's."""

    def __init__(
        self, accelerator: Accelerator, parallel: DataParallel, probe: Probe, loss_scaler: LossScaler, loss_chunks: int
    ) -> None:
        super().__init__(parallel, probe, loss_scaler, loss_chunks)
        self.accelerator = accelerator

    def backward(self, loss: Tensor) -> None:
        """Run Accelerate's backward."""
        self.accelerator.backward(loss)


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

    model = build_meta_model(config, probe)
    parallel = AccelerateDDP([model], config, device, prepare, layout.grad_accumulation_steps(config.train))
    parallel.accelerator = accelerator
    scaler = LossScaler(config.precision, layout.dp)
    runner = AccelerateMicroBatches(accelerator, parallel, probe, scaler, config.train.loss_chunks)
    optimizer = accelerator.prepare_optimizer(build_optimizer(master_params(parallel), config))
    return TorchEngine([model], config, parallel, runner, mesh, probe, scaler, optimizer)
