"""Hugging Face Accelerate around the same model: what its wrapper costs. Only where it does what it is asked."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines import Engine, Widths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config import RunConfig
    from harness.layout import Layout
    from harness.machine import Machine
    from harness.measure.probe import Probe


def refusals(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    if layout.data_parallel != "ddp" or layout.zero_stage > 0 or layout.dp_shard > 1:
        reason = (
            "Accelerate silently drops sharding on CPU and would train plain DDP"
            if machine.device == "cpu"
            else "its sharded layouts are not supported yet"
        )
        yield f"strategy.engine=accelerate with strategy={config.strategy.name}: {reason}; choose strategy=ddp"
    for axis in ("tp", "cp", "pp"):
        if getattr(layout, axis) > 1:
            yield f"strategy.{axis}={getattr(layout, axis)} is not supported by strategy.engine=accelerate: choose 1"
    if layout.offload != "none":
        yield f"strategy.offload={layout.offload} is not supported by strategy.engine=accelerate: choose none"


def environment(machine: "Machine", cache: Path) -> dict[str, str]:
    return {}


def widths(config: "RunConfig", layout: "Layout") -> Widths:
    import harness.engines.torch as torch_engine

    return torch_engine.widths(config, layout)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """DistributedDataParallel and the optimizer through Accelerator.prepare; Accelerate's own backward and no_sync."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from harness.checkpointing import model_on_meta
    from harness.engines.torch import TorchEngine, adamw
    from harness.engines.torch.passes import Sequential
    from harness.engines.torch.replicate import Replicate, ddp_options
    from harness.engines.torch.scaling import LossScale

    wrapper = DistributedDataParallelKwargs(**ddp_options(config))
    # No autocast and no accumulation of its own: the loop's precision and its micro-batches, as in every engine.
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[wrapper])

    def prepare(model: nn.Module) -> nn.Module:
        prepared = accelerator.prepare_model(model)
        if not isinstance(prepared, DistributedDataParallel):
            raise RuntimeError(f"Accelerate made a {type(prepared).__name__} of the model, not DistributedDataParallel")
        return prepared

    class Prepared(Replicate):
        def unsynchronised(self, module: DistributedDataParallel) -> AbstractContextManager[None]:
            context: AbstractContextManager[None] = accelerator.no_sync(module)
            return context

    class PreparedPasses(Sequential):
        def backward(self, loss: Tensor) -> None:
            accelerator.backward(loss)

    model = model_on_meta(config, probe)
    parallel = Prepared([model], config, device, prepare, layout.accumulation(config.train))
    scale = LossScale(config.precision, layout.dp)
    engine = TorchEngine(
        [model],
        config,
        parallel,
        PreparedPasses(parallel, probe, scale, config.train.loss_chunks),
        mesh,
        probe,
        scale,
        adamw(parallel, config.train),
    )
    engine.optimizer = accelerator.prepare_optimizer(engine.optimizer)
    return engine
