"""A DeepSpeed engine through Accelerator.prepare with its plugin, given DeepSpeed's own configuration whole.

Read in Accelerate 1.15. Told the backend, it makes a real DeepSpeed engine on a CPU too; left to itself it takes each
rank for a world of its own. Its backward steps the optimizer as well, so that gradients could not be looked at in
between: backward and step are the DeepSpeed engine's, as Accelerate's only pass on to them.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config.schema import RunConfig
from harness.engines.base import Engine
from harness.engines.deepspeed.build import build_engine
from harness.engines.deepspeed.engine import DeepSpeedTrainEngine
from harness.layout.layout import Layout
from harness.probe import Probe


def build(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device, probe: Probe) -> Engine:
    accumulation = layout.grad_accumulation_steps(config.train)

    def initialise(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: dict[str, Any]) -> Any:
        # zero3_init_flag: transformers would build models of its own sharded; this one is.
        plugin = DeepSpeedPlugin(hf_ds_config=chosen, zero3_init_flag=False)
        accelerator = Accelerator(
            mixed_precision="no",  # DeepSpeed's configuration says it
            gradient_accumulation_steps=accumulation,
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(backend=dist.get_backend())],
        )
        engine, _ = accelerator.prepare(model, optimizer)
        verify_prepared(engine, accelerator, layout, accumulation)
        return engine

    engine, names = build_engine(config, layout, device, probe, initialise)
    return DeepSpeedTrainEngine(engine, names, layout, probe, config.train.loss_chunks)


def verify_prepared(engine: Any, accelerator: Accelerator, layout: Layout, accumulation: int) -> None:
    """Raises RuntimeError if what Accelerate made is not this layout."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        raise RuntimeError(f"Accelerate made a {type(engine).__name__} of the model, not a DeepSpeed engine")
    found = (
        engine.zero_optimization_stage(),
        dist.get_world_size(engine.data_parallel_group),
        accelerator.num_processes,
        engine.gradient_accumulation_steps(),
    )
    expected = (layout.zero_stage, layout.dp_shard, layout.dp_shard, accumulation)
    if found != expected:
        raise RuntimeError(
            f"Accelerate made DeepSpeed's (stage, ranks, processes, accumulation) {found} of what is {expected}"
        )
