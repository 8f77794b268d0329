"""Entry points of ranks for the tests of Accelerate: its sharding on a CPU, and faults planted in it."""

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


def sharded_on_cpu(run_dir: str) -> None:
    """Make Accelerate shard on a CPU by setting the state that it would detect on a machine with GPUs.

    It raises RuntimeError if the model has values before it is sharded.
    """

    def accelerator_of(config: Any, layout: Any, model: Any) -> Accelerator:
        accelerator = Accelerator(cpu=True, mixed_precision="no")
        state = accelerator.state
        state.fsdp_plugin = fsdp.create_fsdp_plugin(config, layout, model)
        state.parallelism_config = ParallelismConfig(
            dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard
        )
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
        state.distributed_type = DistributedType.FSDP
        prepare = accelerator.prepare

        def prepare_without_values(model: Any, *others: Any) -> Any:
            if any(not parameter.is_meta for parameter in model.parameters()):
                raise RuntimeError("a rank holds the whole model before it is sharded")
            return prepare(model, *others)

        accelerator.prepare = prepare_without_values  # type: ignore[method-assign]
        return accelerator

    fsdp.create_accelerator = accelerator_of
    worker_main.main(run_dir)


def sharding_ignored(run_dir: str) -> None:
    """Leave Accelerate as it is on a CPU, where it ignores the plugin for sharding."""
    plugin_of = fsdp.create_fsdp_plugin

    def accelerator_of(config: Any, layout: Any, model: Any) -> Accelerator:
        return Accelerator(cpu=True, mixed_precision="no", fsdp_plugin=plugin_of(config, layout, model))

    fsdp.create_accelerator = accelerator_of
    worker_main.main(run_dir)


def one_group(run_dir: str) -> None:
    """Give Accelerate no layer to make a group of, so that all parameters are gathered at once."""
    plugin_of = fsdp.create_fsdp_plugin

    def plugin(config: Any, layout: Any, model: Any) -> FullyShardedDataParallelPlugin:
        fsdp_plugin = plugin_of(config, layout, model)
        fsdp_plugin.transformer_cls_names_to_wrap = []
        return fsdp_plugin

    fsdp.create_fsdp_plugin = plugin
    sharded_on_cpu(run_dir)


def root_left_gathered(run_dir: str) -> None:
    """Keep the norm and the root gathered from forward to backward, which is Accelerate's own default."""
    FSDPModule.set_reshard_after_forward = lambda *arguments: None  # type: ignore[method-assign]
    sharded_on_cpu(run_dir)


def other_stage(run_dir: str) -> None:
    """Start DeepSpeed with another stage than the one configured."""
    plugin_class = deepspeed.DeepSpeedPlugin

    def plugin(hf_ds_config: dict[str, Any], **others: Any) -> Any:
        hf_ds_config["zero_optimization"]["stage"] = 1
        return plugin_class(hf_ds_config=hf_ds_config, **others)

    deepspeed.DeepSpeedPlugin = plugin
    worker_main.main(run_dir)


def prepare_linear(run_dir: str) -> None:
    """Write what Accelerate makes of a model on a CPU with a plugin for fully_shard."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    numel = sum(parameter.numel() for parameter in prepared.parameters())
    result = {"wrapper": type(prepared).__name__, "elements": numel, "ranks": accelerator.num_processes}
    atomic_write_json(Path(run_dir) / f"{dist.get_rank()}.json", result)
    dist.destroy_process_group()
