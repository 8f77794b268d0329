"""Entry points of ranks for the tests of Accelerate: its sharding on a CPU, and faults planted in it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

from harness.engines.accelerate import fsdp
from harness.util.files import atomic_write_json
from tests.support.plant import changed, replaces

FSDP = "harness.engines.accelerate.fsdp"


@replaces(f"{FSDP}.create_accelerator")
def sharded_on_cpu(_: Any, config: Any, layout: Any, model: Any) -> Accelerator:
    """Make Accelerate shard on a CPU by setting the state that it would detect on a machine with GPUs.

    It raises RuntimeError if the model has values before it is sharded.
    """
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    state = accelerator.state
    state.fsdp_plugin = fsdp.create_fsdp_plugin(config, layout, model)
    state.parallelism_config = ParallelismConfig(dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard)
    state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
    state.distributed_type = DistributedType.FSDP
    accelerator.prepare = changed(prepare_without_values, accelerator.prepare)  # type: ignore[method-assign]
    return accelerator


def prepare_without_values(prepare: Any, model: Any, *others: Any) -> Any:
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("a rank holds the whole model before it is sharded")
    return prepare(model, *others)


@replaces(f"{FSDP}.create_accelerator")
def sharding_ignored(_: Any, *arguments: Any) -> Accelerator:
    """Leave Accelerate as it is on a CPU, where it ignores the plugin for sharding."""
    return Accelerator(cpu=True, mixed_precision="no", fsdp_plugin=fsdp.create_fsdp_plugin(*arguments))


@replaces(f"{FSDP}.create_fsdp_plugin", worker=sharded_on_cpu)
def one_group(ordinary: Any, *arguments: Any) -> FullyShardedDataParallelPlugin:
    """Give Accelerate no layer to make a group of, so that all parameters are gathered at once."""
    plugin: FullyShardedDataParallelPlugin = ordinary(*arguments)
    plugin.transformer_cls_names_to_wrap = []
    return plugin


@replaces("torch.distributed.fsdp.FSDPModule.set_reshard_after_forward", worker=sharded_on_cpu)
def root_left_gathered(*_: Any) -> None:
    """Keep the norm and the root gathered from forward to backward, which is Accelerate's own default."""


@replaces("harness.engines.accelerate.deepspeed.DeepSpeedPlugin")
def other_stage(ordinary: Any, hf_ds_config: dict[str, Any], **others: Any) -> Any:
    """Start DeepSpeed with another stage than the one configured."""
    hf_ds_config["zero_optimization"]["stage"] = 1
    return ordinary(hf_ds_config=hf_ds_config, **others)


def prepare_linear(run_dir: str) -> None:
    """Write what Accelerate makes of a model on a CPU with a plugin for fully_shard."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    numel = sum(parameter.numel() for parameter in prepared.parameters())
    result = {"wrapper": type(prepared).__name__, "elements": numel, "ranks": accelerator.num_processes}
    atomic_write_json(Path(run_dir) / f"{dist.get_rank()}.json", result)
    dist.destroy_process_group()
