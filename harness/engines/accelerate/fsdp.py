"""fully_shard and the optimizer through Accelerator.prepare with its plugin for FSDP2; Accelerate's own backward.

Read in Accelerate 1.15 (utils/fsdp_utils.py). It wants the whole model with its values before it shards, on the host
here, so that a device never holds more than a group of it. Layers are groups by the names of their classes; the final
norm is one by itself. Norm and root it leaves gathered until backward, which is neither ZeRO-3's memory nor its volume:
set_reshard_after_forward says it again for all groups. Micro-batches reduce as in the torch engine, by fully_shard's
own switches: Accelerate's no_sync would keep whole gradients, against what stages 2 and 3 promise.
"""

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.config.schema import RunConfig
from harness.engines.accelerate.ddp import AccelerateMicroBatches
from harness.engines.base import Engine
from harness.engines.torch.engine import TorchEngine, build_adamw
from harness.engines.torch.fsdp import FSDPParams, fsdp_param_groups, mixed_precision_policy
from harness.engines.torch.loss_scaler import LossScaler
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.models.decoder import Decoder
from harness.models.init_weights import materialize
from harness.probe import Probe


class AccelerateFSDP(FSDPParams):
    """A model that Accelerate has sharded."""

    def __init__(self, model: nn.Module, zero_stage: int) -> None:
        self.attach([model], zero_stage)


class UnshardedParams:
    """A model before it is sharded, as far as an optimizer must know it."""

    def __init__(self, model: nn.Module) -> None:
        self.names = dict(model.named_parameters())

    def trained(self, name: str) -> nn.Parameter:
        return self.names[name]


def build(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device, probe: Probe) -> Engine:
    model = build_meta_model(config, probe)
    accelerator = create_accelerator(config, layout, model)
    host, master = torch.device("cpu"), getattr(torch, config.precision.master)
    materialize(model, config.model, config.train.seed, device, master, storage_device=host)
    prepared, optimizer = accelerator.prepare(model, build_adamw(UnshardedParams(model), config.train))  # type: ignore[arg-type]
    if not isinstance(prepared, FSDPModule):
        raise RuntimeError(f"Accelerate made a {type(prepared).__name__} of the model, not what fully_shard makes")
    prepared.set_reshard_after_forward(layout.zero_stage == 3)
    verify_prepared(prepared, config, layout)
    parallel = AccelerateFSDP(model, layout.zero_stage)  # sharded in place
    scale = LossScaler(config.precision, layout.dp)
    passes = AccelerateMicroBatches(accelerator, parallel, probe, scale, config.train.loss_chunks)
    return TorchEngine([model], config, parallel, passes, mesh, probe, scale, optimizer)


def create_fsdp_plugin(config: RunConfig, layout: Layout, model: Decoder) -> FullyShardedDataParallelPlugin:
    """Every layer, embedding and head a group; widths as in the torch engine."""
    ends = [module for group in model.embedding_and_head_groups() for module in group if module is not model.norm]
    groups = [*model.layers_by_index().values(), *ends]
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.zero_stage == 3,
        mixed_precision_policy=mixed_precision_policy(config.precision),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(module).__name__ for module in groups}),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,  # the model's own
    )


def create_accelerator(config: RunConfig, layout: Layout, model: Decoder) -> Accelerator:
    """Needs a GPU: without one Accelerate lets go of the plugin and says nothing."""
    return Accelerator(
        mixed_precision="no",
        fsdp_plugin=create_fsdp_plugin(config, layout, model),
        parallelism_config=ParallelismConfig(dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard),
    )


def verify_prepared(model: FSDPModule, config: RunConfig, layout: Layout) -> None:
    """Raises RuntimeError if what Accelerate made is not this layout."""
    copies = [layout.dp_replicate] if layout.dp_replicate > 1 else []
    expected = ((*copies, layout.dp_shard), (*[Replicate()] * len(copies), Shard(0)))
    assert isinstance(model, nn.Module)
    for name, parameter in model.named_parameters():
        found = (tuple(parameter.device_mesh.shape), parameter.placements) if isinstance(parameter, DTensor) else None
        if found != expected:
            raise RuntimeError(f"Accelerate left {name} as {found or 'a whole tensor'}, not {expected}")
    groups = list(fsdp_param_groups(model))
    if len(groups) <= config.model.num_hidden_layers:
        raise RuntimeError(f"Accelerate made {len(groups)} groups of {config.model.num_hidden_layers} layers and ends")
    if any(group.mp_policy != mixed_precision_policy(config.precision) for group in groups):
        raise RuntimeError(f"Accelerate changed the widths of precision={config.precision.name}")
    if any((group.post_forward_mesh_info is None) is (layout.zero_stage == 3) for group in groups):
        raise RuntimeError(f"Accelerate reshards otherwise than strategy.zero_stage={layout.zero_stage}")
