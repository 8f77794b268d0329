"""A DeepSpeed engine by Accelerator.prepare with its plugin, which gets DeepSpeed's own configuration unchanged.

This follows the source of Accelerate 1.15. With an explicit backend it builds a real DeepSpeed engine on a CPU too; by
default each rank would be a world of size 1. Accelerate's backward also steps the optimizer, so that gradients could
not be measured in between. Therefore the DeepSpeed engine's own backward and step are called, which Accelerate's
backward only delegates to.
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
from harness.engines.deepspeed.engine import DeepSpeedTrainEngine
from harness.engines.deepspeed.initialize import build_engine
from harness.layout.layout import Layout
from harness.probe import Probe


def build(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device, probe: Probe) -> Engine:
    """Build the DeepSpeed engine of this run through Accelerate."""
    accumulation = layout.grad_accumulation_steps(config.train)

    def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: dict[str, Any]) -> Any:
        # zero3_init_flag would make transformers shard the models it builds; this model is sharded already.
        plugin = DeepSpeedPlugin(hf_ds_config=ds_config, zero3_init_flag=False)
        accelerator = Accelerator(
            mixed_precision="no",  # DeepSpeed's own configuration sets the precision
            gradient_accumulation_steps=accumulation,
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(backend=dist.get_backend())],
        )
        engine, _ = accelerator.prepare(model, optimizer)
        verify_prepared(engine, accelerator, layout, accumulation)
        return engine

    engine, param_slices = build_engine(config, layout, device, probe, initialize)
    return DeepSpeedTrainEngine(engine, param_slices, layout, probe, config.train.loss_chunks)


def verify_prepared(engine: Any, accelerator: Accelerator, layout: Layout, accumulation: int) -> None:
    """Raise RuntimeError if the engine that Accelerate built does not have this layout."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        raise RuntimeError(f"Accelerator.prepare returned a {type(engine).__name__} instead of a DeepSpeedEngine")
    actual = (
        engine.zero_optimization_stage(),
        dist.get_world_size(engine.data_parallel_group),
        accelerator.num_processes,
        engine.gradient_accumulation_steps(),
    )
    expected = (layout.zero_stage, layout.dp_shard, layout.dp_shard, accumulation)
    if actual != expected:
        raise RuntimeError(
            f"Accelerate built DeepSpeed with (stage, ranks, processes, accumulation) = {actual}, not {expected}"
        )
