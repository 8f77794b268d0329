"""fully_shard and the optimizer by Accelerator.prepare with its plugin for FSDP2, with Accelerate's own backward.

This follows the source of Accelerate 1.15 (utils/fsdp_utils.py). Accelerate shards the model on the meta device, and
its shards get their values afterwards, so that no rank ever holds the whole model. Accelerate forms a group of each
layer, which it recognizes by the name of its class; the final norm is a group of its own. Accelerate leaves norm and
root gathered until backward, which matches neither the memory nor the communication volume of ZeRO-3, so
set_reshard_after_forward overrides this for all groups. Gradients of micro-batches are reduced as in the torch engine,
by fully_shard's own switches: Accelerate's no_sync would keep unsharded gradients, which stages 2 and 3 must not keep.
"""

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.config.schema import RunConfig
from harness.engines.base import Engine
from harness.engines.torch.engine import whole_model_engine
from harness.engines.torch.fsdp import FSDPParams, end_backward_prefetch, fsdp_param_groups, mixed_precision_policy
from harness.layout.layout import Layout
from harness.models.build import build_meta_model
from harness.models.decoder import Decoder
from harness.models.init_weights import materialize
from harness.probe import Probe


def build(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device, probe: Probe) -> Engine:
    """Build a TorchEngine around what Accelerate prepares; raise RuntimeError if that is not this layout.

    Accelerate prepares no model without an optimizer, whose parameters it finds again by their addresses. On the meta
    device they have none, so that the optimizer that trains is made of the shards, and prepared by itself.
    """
    model = build_meta_model(config, layout, device, probe)
    accelerator = create_accelerator(config, layout, model)
    if not accelerator.is_fsdp2:
        raise RuntimeError(f"Accelerate dropped its plugin for FSDP2: it would train as {accelerator.distributed_type}")
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    if not isinstance(prepared, FSDPModule):
        raise RuntimeError(f"Accelerator.prepare returned a {type(prepared).__name__} instead of an FSDPModule")
    prepared.set_reshard_after_forward(layout.zero_stage == 3)
    verify_prepared(prepared, config, layout)
    materialize(model, config.model, config.train.seed, device, getattr(torch, config.precision.master))
    parts = [*model.embedding_and_head_groups()[0], *model.layers_by_index().values()]
    end_backward_prefetch(next(part for part in parts if isinstance(part, FSDPModule)))
    parallel = FSDPParams([model], layout.zero_stage)  # sharded in place
    return whole_model_engine(model, config, layout, mesh, probe, parallel, accelerator)


def create_fsdp_plugin(config: RunConfig, layout: Layout, model: Decoder) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's plugin with the torch engine's dtypes; each layer, embedding and head is a group."""
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
        activation_checkpointing=False,  # the model checkpoints itself
    )


def create_accelerator(config: RunConfig, layout: Layout, model: Decoder) -> Accelerator:
    """Return the Accelerator of this run. It needs a GPU: without one Accelerate silently drops the plugin."""
    return Accelerator(
        mixed_precision="no",
        fsdp_plugin=create_fsdp_plugin(config, layout, model),
        parallelism_config=ParallelismConfig(dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard),
    )


def verify_prepared(model: FSDPModule, config: RunConfig, layout: Layout) -> None:
    """Raise RuntimeError if the model that Accelerate sharded does not have this layout."""
    replicas = [layout.dp_replicate] if layout.dp_replicate > 1 else []
    expected = ((*replicas, layout.dp_shard), (*[Replicate()] * len(replicas), Shard(0)))
    assert isinstance(model, nn.Module)
    for name, parameter in model.named_parameters():
        actual = (tuple(parameter.device_mesh.shape), parameter.placements) if isinstance(parameter, DTensor) else None
        if actual != expected:
            raise RuntimeError(f"Accelerate left {name} as {actual or 'a whole tensor'}, not {expected}")
    groups = list(fsdp_param_groups(model))
    if len(groups) <= config.model.num_hidden_layers:
        raise RuntimeError(
            f"Accelerate made {len(groups)} groups of {config.model.num_hidden_layers} layers, embedding and head"
        )
    if any(group.mp_policy != mixed_precision_policy(config.precision) for group in groups):
        raise RuntimeError(f"Accelerate changed the data types of precision={config.precision.name}")
    if any((group.post_forward_mesh_info is None) is (layout.zero_stage == 3) for group in groups):
        raise RuntimeError(f"Accelerate does not reshard as strategy.zero_stage={layout.zero_stage} requires")
