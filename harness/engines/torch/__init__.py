"""The engine of PyTorch's own parallelisms: DDP, FSDP2, tensor, expert, context and pipeline parallelism."""

from typing import TYPE_CHECKING

from harness.engines.base import Engine
from harness.engines.torch.compatibility import unsupported as unsupported
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import Padding, StateWidths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.engines.torch.data_parallel import DataParallel
    from harness.engines.torch.micro_batches import MicroBatchRunner
    from harness.layout.layout import Layout
    from harness.probe import Probe


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    """Return the bytes per element that parameters, gradients, masters and moments take."""
    precision = config.precision
    compute, master, gradients = precision.compute_bytes, precision.master_bytes, precision.accumulate_bytes
    padding: Padding = "rows" if layout.data_parallel == "fsdp" else "none"
    if layout.offload != "none":
        return StateWidths(master, compute, 0, masters=0, gathered=compute, padding=padding, host_gradients=master)
    if layout.data_parallel == "fsdp" or not precision.is_mixed:  # sharded parameters are their own masters
        return StateWidths(master, compute, gradients, masters=0, gathered=compute, padding=padding)
    return StateWidths(compute, compute, gradients, masters=master, gathered=compute)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """Build the model under this layout.

    The order is fixed: tensor, expert and context parallelism, compile, checkpointing and offload, data parallelism,
    pipeline.
    """
    import torch.distributed as dist

    from harness.engines.torch.context_parallel import apply_context_parallel
    from harness.engines.torch.data_parallel import master_params
    from harness.engines.torch.ddp import DividedExperts, ReplicatedParams, distributed_data_parallel
    from harness.engines.torch.engine import TorchEngine
    from harness.engines.torch.expert_parallel import exchange_tokens, shard_experts
    from harness.engines.torch.fsdp import FSDPParams, shard_parts
    from harness.engines.torch.loss_scaler import LossScaler
    from harness.engines.torch.mesh import flattened_submesh, replica_group
    from harness.engines.torch.micro_batches import GradAccumulationLoop
    from harness.engines.torch.optimizer import build_optimizers
    from harness.engines.torch.pipeline_parallel import Pipeline, TiedTable
    from harness.engines.torch.tensor_parallel import apply_hf_tensor_plan, apply_tensor_parallel
    from harness.engines.torch.ulysses import exchange_heads
    from harness.layout.partition import stages_of_rank
    from harness.models.build import apply_model_transforms, build_part

    rank = dist.get_rank()
    stages = stages_of_rank(config.model, layout, rank)
    parts = [build_part(config, device, stage) for stage in stages]
    for part in parts:
        part.sequence_chunks = layout.sequence_chunks(rank, config.train.seq_len)
        if layout.tp_enabled:
            if not model_profile(config.model).is_project_decoder:
                apply_hf_tensor_plan(part, config.model, mesh["tp"])
            else:
                apply_tensor_parallel(part, mesh["tp"], layout.sequence_parallel)
        if config.model.num_experts and (layout.tp_enabled or layout.ep_enabled):
            shard_experts(part, mesh)
        if layout.ep_enabled:
            exchange_tokens(part, mesh.get_group("ep"))
        if layout.cp_enabled:
            if layout.exchanges_heads:
                exchange_heads(part, mesh.get_group("cp"))
            else:
                apply_context_parallel(part, mesh.get_group("cp"), part.sequence_chunks)
        apply_model_transforms(part, config, layout, probe)
    parallel: DataParallel
    if layout.data_parallel == "fsdp":
        shard_parts(parts, config, layout, mesh, device)
        parallel = FSDPParams(parts, layout.zero_stage)
    elif layout.data_parallel == "ddp":
        group, experts = replica_group(mesh), None
        if layout.ep_enabled:
            copies = flattened_submesh(mesh, layout.of_experts.replica_axes).get_group()
            experts = DividedExperts(copies, group.size())
        wrap = distributed_data_parallel(group, device, config)
        accumulation = layout.grad_accumulation_steps(config.train)
        parallel = ReplicatedParams(parts, config, device, wrap, accumulation, experts=experts)
    else:
        parallel = ReplicatedParams(parts, config, device)
    scaler = LossScaler(config.precision, layout.dp * layout.cp)
    tied = None
    runner: MicroBatchRunner = GradAccumulationLoop(parallel, probe, scaler, config.train.loss_chunks)
    if layout.pp_enabled:
        group = mesh.get_group("pp")
        runner = Pipeline(stages, config, layout, group, device, parallel, probe, scaler)
        if config.model.tie_word_embeddings and "embed_tokens.weight" in parallel.parameters:
            tied = TiedTable(parallel.master_param("embed_tokens.weight"), group, device)
    partition_group = mesh.get_group("dp_shard") if layout.partitions_by_parameter else None
    optimizers = build_optimizers(master_params(parallel), config, partition_group)
    return TorchEngine(parts, config, parallel, runner, mesh, probe, scaler, optimizers, tied)
