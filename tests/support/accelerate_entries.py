"""What ranks run in the tests of Accelerate: its way to fully_shard on a CPU, and faults in what it makes."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

from harness.engines.accelerate import deepspeed, fsdp
from harness.util.files import atomic_write_json
from harness.worker import main as worker_main


def told_to_shard(run_dir: str) -> None:
    """Accelerate takes the way it has for GPUs: its state is told what it would find out with one."""

    def accelerator_of(config: Any, layout: Any, model: Any) -> Accelerator:
        accelerator = Accelerator(cpu=True, mixed_precision="no")
        state = accelerator.state
        state.fsdp_plugin = fsdp.create_fsdp_plugin(config, layout, model)
        state.parallelism_config = ParallelismConfig(
            dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard
        )
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
        state.distributed_type = DistributedType.FSDP
        return accelerator

    fsdp.create_accelerator = accelerator_of
    worker_main.main(run_dir)


def left_alone(run_dir: str) -> None:
    """Accelerate as it is on a CPU, which drops the plugin for sharding."""
    plugin_of = fsdp.create_fsdp_plugin

    def accelerator_of(config: Any, layout: Any, model: Any) -> Accelerator:
        return Accelerator(cpu=True, mixed_precision="no", fsdp_plugin=plugin_of(config, layout, model))

    fsdp.create_accelerator = accelerator_of
    worker_main.main(run_dir)


def one_group(run_dir: str) -> None:
    """Accelerate finds no layer to make a group of: all parameters are gathered at once."""
    plugin_of = fsdp.create_fsdp_plugin

    def plugin(config: Any, layout: Any, model: Any) -> FullyShardedDataParallelPlugin:
        made = plugin_of(config, layout, model)
        made.transformer_cls_names_to_wrap = []
        return made

    fsdp.create_fsdp_plugin = plugin
    told_to_shard(run_dir)


def root_left_gathered(run_dir: str) -> None:
    """As Accelerate leaves it: norm and root stay whole from forward to backward."""
    FSDPModule.set_reshard_after_forward = lambda *arguments: None  # type: ignore[method-assign]
    told_to_shard(run_dir)


def other_stage(run_dir: str) -> None:
    """DeepSpeed is started with another stage than asked for."""
    plugin_class = deepspeed.DeepSpeedPlugin

    def plugin(hf_ds_config: dict[str, Any], **others: Any) -> Any:
        hf_ds_config["zero_optimization"]["stage"] = 1
        return plugin_class(hf_ds_config=hf_ds_config, **others)

    deepspeed.DeepSpeedPlugin = plugin
    worker_main.main(run_dir)


def main() -> None:
    """Two processes by torchrun: writes what Accelerate makes of a model on a CPU with a plugin for fully_shard."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    held = sum(parameter.numel() for parameter in prepared.parameters())
    found = {"made": type(prepared).__name__, "held": held, "ranks": accelerator.num_processes}
    atomic_write_json(Path(os.environ["FOUND"]) / f"{dist.get_rank()}.json", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
