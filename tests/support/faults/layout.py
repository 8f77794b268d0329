"""State on the wrong ranks, in the wrong width or in the wrong place."""

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

import harness.models.activation_checkpoint
import harness.models.build
import harness.models.decoder
import harness.models.init_weights
from harness.config.strategy import AXES
from harness.engines import torch as torch_engine
from harness.engines.deepspeed import initialize as deepspeed_initialize
from harness.engines.torch import (
    fsdp,
    tensor_parallel,
)
from harness.layout import partition
from harness.models import activation_offload
from harness.worker import main as worker_main


def sharding_dropped(run_dir: str) -> None:
    """Run the strategy as plain DDP, which trains correctly but keeps everything on every rank."""
    build = torch_engine.build

    def plain(config: Any, layout: Any, mesh: Any, device: Any, probe: Any) -> Any:
        whole = dataclasses.replace(layout, data_parallel="ddp", zero_stage=0, dp_replicate=layout.dp_shard, dp_shard=1)
        mesh = init_device_mesh("cpu", whole.mesh_shape, mesh_dim_names=AXES)
        return build(config, whole, mesh, device, probe)

    torch_engine.build = plain
    worker_main.main(run_dir)


def lower_stage(run_dir: str) -> None:
    """Run ZeRO-2 as ZeRO-1, which synchronizes once a step instead of after every micro-batch."""
    settings = deepspeed_initialize.deepspeed_config

    def spoiled(*arguments: Any) -> Any:
        chosen = settings(*arguments)
        chosen["zero_optimization"]["stage"] = 1
        return chosen

    deepspeed_initialize.deepspeed_config = spoiled
    worker_main.main(run_dir)


def tensor_parallel_dropped(run_dir: str) -> None:
    """Leave the model unsharded, so that every rank trains all of it."""
    tensor_parallel.apply_tensor_parallel = lambda model, mesh, sequence_parallel: None
    worker_main.main(run_dir)


def sharding_over_all(run_dir: str) -> None:
    """Shard the parameters of hybrid sharding over the replicas too."""
    alone = DeviceMesh._concatenate
    fsdp.hsdp_mesh = lambda mesh, layout: alone([mesh["pp"], mesh["dp_replicate", "dp_shard"]._flatten()])
    worker_main.main(run_dir)


def whole_gradient(run_dir: str) -> None:
    """Use torch's own embedding sharded by rows, whose gradient is whole on every rank."""
    tensor_parallel.VocabularyParallelEmbedding = lambda output: RowwiseParallel(  # type: ignore[assignment,misc]
        input_layouts=Replicate(), output_layouts=output
    )
    worker_main.main(run_dir)


def other_layers(run_dir: str) -> None:
    """Give both stages the same layers."""
    ordinary = partition.stages_of_rank

    def spoiled(model: Any, layout: Any, number: int) -> Any:
        return [dataclasses.replace(stage, first_layer=0) for stage in ordinary(model, layout, number)]

    partition.stages_of_rank = spoiled
    worker_main.main(run_dir)


def whole_model_built(run_dir: str) -> None:
    """Make all of the model's weights on a stage before those of other stages are freed."""
    build = harness.models.build.build_model

    def spoiled(model: Any, stage: Any = None) -> Any:
        harness.models.init_weights.materialize(build(model), model, 0, torch.device("cpu"), torch.float32)
        return build(model, stage)

    harness.models.build.build_model = spoiled
    worker_main.main(run_dir)


def summed_in_16_bit(run_dir: str) -> None:
    """Leave DeepSpeed at its default, which sums gradients in the data type of the compute."""
    settings = deepspeed_initialize.deepspeed_config

    def spoiled(*arguments: Any) -> Any:
        chosen = settings(*arguments)
        chosen["data_types"]["grad_accum_dtype"] = "bf16"
        return chosen

    deepspeed_initialize.deepspeed_config = spoiled
    worker_main.main(run_dir)


def offload_dropped(run_dir: str) -> None:
    """Leave the offload out of DeepSpeed's configuration, so that it trains correctly on the device."""
    settings = deepspeed_initialize.deepspeed_config

    def spoiled(config: Any, layout: Any, device: Any) -> Any:
        return settings(config, dataclasses.replace(layout, offload="none"), device)

    deepspeed_initialize.deepspeed_config = spoiled
    worker_main.main(run_dir)


def shards_not_offloaded(run_dir: str) -> None:
    """Give fully_shard no offload policy."""
    fsdp.CPUOffloadPolicy = lambda **_: fsdp.OffloadPolicy()  # type: ignore[assignment,misc]
    worker_main.main(run_dir)


def last_layer_not_offloaded(run_dir: str) -> None:
    """Leave what the last layer saves for backward on the device."""
    around = activation_offload.OffloadHooks.wrap_forward

    def spoiled(self: Any, block: Any, forward: Any, *arguments: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return forward(*arguments) if self.calls % 4 == 0 else around(self, block, forward, *arguments)

    activation_offload.OffloadHooks.wrap_forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def autotp_dropped(run_dir: str) -> None:
    """Train the whole model on every rank, and sum nothing."""

    def spoiled(model: Any, *_: Any) -> Any:
        model.ds_autotp_parsed = True
        return {}

    deepspeed_initialize.apply_tensor_parallel = spoiled
    worker_main.main(run_dir)


def autotp_parts_swapped(run_dir: str) -> None:
    """Give each rank the rows and columns of the other rank, under its own offsets."""
    from deepspeed.module_inject import layers

    def spoiled(dimension: int) -> Any:
        def partition(self: Any, parameters: Any) -> None:
            weight = parameters[0]
            other = weight.split(self._partition_sizes, dim=dimension)[self.tp_world_size - 1 - self.tp_index]
            weight.data = other.clone()

        return partition

    layers.LinearLayer.uneven_partition = spoiled(0)
    layers.LinearAllreduce.uneven_partition = spoiled(1)
    worker_main.main(run_dir)
