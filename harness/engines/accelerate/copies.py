"""DistributedDataParallel and the optimizer through Accelerator.prepare; Accelerate's own backward and no_sync."""

from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from harness.checkpointing import model_on_meta
from harness.config import RunConfig
from harness.engines import Engine
from harness.engines.torch import TorchEngine, adamw
from harness.engines.torch.data_parallel import DataParallel
from harness.engines.torch.passes import Sequential
from harness.engines.torch.replicate import Copies
from harness.engines.torch.scaling import LossScale
from harness.layout import Layout
from harness.measure.probe import Probe
from harness.plan.buffers import ddp_options


class Prepared(Copies):
    """Copies whose synchronisation is put off by Accelerate's means."""

    accelerator: Accelerator

    def unsynchronised(self, module: DistributedDataParallel) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.accelerator.no_sync(module)
        return context


class PreparedPasses(Sequential):
    """Passes whose backward is Accelerate's."""

    def __init__(
        self, accelerator: Accelerator, parallel: DataParallel, probe: Probe, scale: LossScale, loss_chunks: int
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

    model = model_on_meta(config, probe)
    parallel = Prepared([model], config, device, prepare, layout.accumulation(config.train))
    parallel.accelerator = accelerator
    scale = LossScale(config.precision, layout.dp)
    passes = PreparedPasses(accelerator, parallel, probe, scale, config.train.loss_chunks)
    engine = TorchEngine([model], config, parallel, passes, mesh, probe, scale, adamw(parallel, config.train))
    engine.optimizer = accelerator.prepare_optimizer(engine.optimizer)
    return engine
