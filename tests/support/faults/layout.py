"""State on the wrong ranks, in the wrong width or in the wrong place."""

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from harness.config.strategy import AXES
from harness.models.init_weights import materialize
from tests.support.faults.plant import replaces

TORCH, DEEPSPEED = "harness.engines.torch", "harness.engines.deepspeed.initialize"


@replaces(f"{TORCH}.build")
def sharding_dropped(ordinary: Any, config: Any, layout: Any, mesh: Any, device: Any, probe: Any) -> Any:
    """Run the strategy as plain DDP, which trains correctly but keeps everything on every rank."""
    whole = dataclasses.replace(layout, data_parallel="ddp", zero_stage=0, dp_replicate=layout.dp_shard, dp_shard=1)
    return ordinary(config, whole, init_device_mesh("cpu", whole.mesh_shape, mesh_dim_names=AXES), device, probe)


@replaces(f"{DEEPSPEED}.deepspeed_config")
def lower_stage(ordinary: Any, *arguments: Any) -> Any:
    """Run ZeRO-2 as ZeRO-1, which synchronizes once a step instead of after every micro-batch."""
    settings = ordinary(*arguments)
    settings["zero_optimization"]["stage"] = 1
    return settings


@replaces(f"{TORCH}.tensor_parallel.apply_tensor_parallel")
def tensor_parallel_dropped(*_: Any) -> None:
    """Leave the model unsharded, so that every rank trains all of it."""


@replaces(f"{TORCH}.fsdp.hsdp_mesh")
def sharding_over_all(_: Any, mesh: Any, layout: Any) -> Any:
    """Shard the parameters of hybrid sharding over the replicas too."""
    return DeviceMesh._concatenate([mesh["pp"], mesh["dp_replicate", "dp_shard"]._flatten()])


@replaces(f"{TORCH}.tensor_parallel.VocabularyParallelEmbedding")
def whole_gradient(_: Any, output: Any) -> Any:
    """Use torch's own embedding sharded by rows, whose gradient is whole on every rank."""
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=output)


@replaces("harness.layout.partition.stages_of_rank")
def other_layers(ordinary: Any, *arguments: Any) -> Any:
    """Give both stages the same layers."""
    return [dataclasses.replace(stage, first_layer=0) for stage in ordinary(*arguments)]


@replaces("harness.models.build.build_model")
def whole_model_built(ordinary: Any, model: Any, stage: Any = None) -> Any:
    """Make all of the model's weights on a stage before those of other stages are freed."""
    materialize(ordinary(model), model, 0, torch.device("cpu"), torch.float32)
    return ordinary(model, stage)


@replaces(f"{DEEPSPEED}.deepspeed_config")
def summed_in_16_bit(ordinary: Any, *arguments: Any) -> Any:
    """Leave DeepSpeed at its default, which sums gradients in the data type of the compute."""
    settings = ordinary(*arguments)
    settings["data_types"]["grad_accum_dtype"] = "bf16"
    return settings


@replaces(f"{DEEPSPEED}.deepspeed_config")
def offload_dropped(ordinary: Any, config: Any, layout: Any, device: Any) -> Any:
    """Leave the offload out of DeepSpeed's configuration, so that it trains correctly on the device."""
    return ordinary(config, dataclasses.replace(layout, offload="none"), device)


@replaces(f"{TORCH}.fsdp.CPUOffloadPolicy")
def shards_not_offloaded(*_: Any, **__: Any) -> Any:
    """Give fully_shard no offload policy."""
    return OffloadPolicy()


@replaces("harness.models.activation_offload.OffloadHooks.wrap_forward")
def last_layer_not_offloaded(ordinary: Any, self: Any, block: Any, forward: Any, *arguments: Any) -> Any:
    """Leave what the last layer saves for backward on the device."""
    self.calls = getattr(self, "calls", 0) + 1
    return forward(*arguments) if self.calls % 4 == 0 else ordinary(self, block, forward, *arguments)


@replaces(f"{DEEPSPEED}.apply_tensor_parallel")
def autotp_dropped(_: Any, model: Any, *__: Any) -> Any:
    """Train the whole model on every rank, and sum nothing."""
    model.ds_autotp_parsed = True
    return {}


LAYERS = "deepspeed.module_inject.layers"


@replaces(f"{LAYERS}.LinearLayer.uneven_partition", f"{LAYERS}.LinearAllreduce.uneven_partition")
def autotp_parts_swapped(ordinary: Any, self: Any, parameters: Any) -> None:
    """Give each rank the rows and columns of the other rank, under its own offsets."""
    dimension = 0 if "LinearLayer" in ordinary.__qualname__ else 1
    parts = parameters[0].split(self._partition_sizes, dim=dimension)
    parameters[0].data = parts[self.tp_world_size - 1 - self.tp_index].clone()
