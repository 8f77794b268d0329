"""Communication, gradients and state of ranks that are otherwise than their layout has them."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from harness.config.strategy import AXES
from harness.engines.torch import data_parallel, grad_norm
from harness.models.init_weights import materialize
from harness.records.run_folder import read_run_spec
from harness.tensors import fp32_sums
from harness.worker import main as worker_main
from tests.support.plant import plant, replaces

TORCH, DEEPSPEED = "harness.engines.torch", "harness.engines.deepspeed.initialize"

# --- communication


@replaces(f"{TORCH}.ddp.ReplicatedParams.sync_context")
def unsynchronized(ordinary: Any, self: Any, last: bool) -> Any:
    """Never exchange the gradients of replicas."""
    return ordinary(self, last=False)


@replaces("harness.measure.communication.CommunicationCounter._count")
def uncounted(ordinary: Any, self: Any, call: Any) -> None:
    """Make the counter miss one kind of operation."""
    if "reduce_scatter" not in call.operator:
        ordinary(self, call)


@replaces(f"{TORCH}.context_parallel.apply_context_parallel")
def own_keys_alone(*_: Any) -> None:
    """Gather nothing for attention, so that a token attends only to its own rank's tokens."""


@replaces(f"{TORCH}.ulysses.exchange_heads")
def own_positions_alone(*_: Any) -> None:
    """Exchange no heads, so that a token attends only to its own rank's tokens."""


@replaces(f"{TORCH}.fsdp.hsdp_mesh")
def replicas_apart(_: Any, mesh: Any, layout: Any) -> Any:
    """Never average gradients over the replicas of hybrid sharding."""
    return DeviceMesh._concatenate([mesh["pp"], mesh["dp_shard"]])


STAGE_3 = "deepspeed.runtime.zero"


@replaces(
    f"{STAGE_3}.stage3.DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor",
    f"{STAGE_3}.partition_parameters.Init._partition_param_sec",
)
def stale_secondary_shards(ordinary: Any, self: Any, *arguments: Any, **keywords: Any) -> None:
    """Gather for backward the secondary shards of the step before; nothing else is sent or held."""
    if not arguments:
        for parameter in (parameter for group in self.fp16_groups for parameter in group):
            parameter.before_update = parameter.ds_secondary_tensor
    ordinary(self, *arguments, **keywords)
    for parameter in (each for each in arguments if getattr(each, "before_update", None) is not None):
        parameter.ds_secondary_tensor.copy_(parameter.before_update)
        parameter.before_update = None


@replaces("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_sharded_post_forward")
def other_secondary_shards(ordinary: Any, self: Any) -> None:
    """Keep in fully_shard's secondary shards of matrices what is half of the parameters."""
    ordinary(self)
    self._sharded_post_forward_param_data *= 0.5 ** (self._orig_size.numel() > 1000)


@replaces(f"{TORCH}.fsdp.apply_fully_shard")
def gathered_among_all(ordinary: Any, model: Any, mesh: Any, policy: Any, _: Any, *others: Any) -> None:
    """Let fully_shard gather among all ranks in backward, too."""
    ordinary(model, mesh, policy, True, *others)


@replaces("torch.distributed.tensor.DTensor.redistribute")
def rows_not_summed(ordinary: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Pass on a row-parallel layer's output without its all-reduce."""
    if self.placements[0].is_partial() and self.ndim == 3:
        return DTensor.from_local(self.to_local(), self.device_mesh, keywords["placements"], run_check=False)
    return ordinary(self, *arguments, **keywords)


@replaces(f"{TORCH}.tensor_parallel.with_local_parameters")
def whole_parameters_apart(ordinary: Any, module: Any, forward: Any, gradients: Any, *inputs: Any) -> Any:
    """Leave the gradient of norms of queries and keys that of this rank's heads."""
    return ordinary(module, forward, gradients and [Replicate()], *inputs)


@replaces(f"{TORCH}.tensor_parallel.PartialKeys._apply")
def rotated_keys_apart(_: Any, self: Any, module: Any, mesh: Any) -> Any:
    """Leave the gradient of latent attention's rotated keys that of this rank's heads."""
    return module


STAGE = f"{TORCH}.pipeline_parallel.PipelineStage"


@replaces(f"{STAGE}.get_fwd_send_ops", f"{STAGE}.get_fwd_recv_ops")
def boundary_sent_twice(ordinary: Any, self: Any, chunk: int) -> Any:
    """Send every activation to the next stage a second time."""
    return 2 * ordinary(self, chunk)


TIED = f"{TORCH}.pipeline_parallel.TiedTable.sum_gradients"


@replaces(TIED)
def tied_gradients_apart(_: Any, self: Any) -> None:
    """Leave the gradient of each use of a tied table on its own end of the pipeline."""


@replaces(TIED)
def tied_gradients_twice(ordinary: Any, self: Any) -> None:
    """Count both uses of a tied table twice."""
    ordinary(self)
    self.master.grad *= 2


@replaces(TIED, of_rank=1)
def tied_at_one_end(ordinary: Any, self: Any) -> None:
    """Send the last stage's gradient of a tied table, and leave out the first stage's there."""
    own = self.master.grad.clone()
    ordinary(self)
    self.master.grad.copy_(own)


@replaces(f"{TORCH}.engine.TorchEngine.reduce_loss_and_norm")
def tied_norm_twice(ordinary: Any, self: Any, loss: Any, *_: Any) -> Any:
    """Count both copies of a tied table's gradient in the global norm."""
    gradients = [master.grad for master in data_parallel.master_params(self.parallel).values()]
    return ordinary(self, loss, gradients, fp32_sums.sums_of_squares(map(grad_norm.local_part, gradients)))


@replaces(f"{TORCH}.tensor_parallel.apply_tensor_parallel")
def sequence_whole(ordinary: Any, model: Any, mesh: Any, sequence_parallel: bool) -> None:
    """Leave out sequence parallelism, so that the same sums are sent as all-reduces."""
    ordinary(model, mesh, False)


@replaces("deepspeed.module_inject.layers.RowParallel.forward")
def autotp_rows_not_summed(_: Any, ctx: Any, group: Any, partial: Any, inference: Any) -> Any:
    """Leave out the sum over the ranks in DeepSpeed's row-parallel layers."""
    return partial


# --- gradients


@replaces(f"{TORCH}.ddp.distributed_data_parallel")
def summed(ordinary: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Sum gradients over ranks instead of averaging them."""

    def all_reduce_sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations than its own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def wrapped(model: Any) -> Any:
        module = ordinary(*arguments)(model)
        module.register_comm_hook(None, all_reduce_sum)
        return module

    return wrapped


GRADIENTS_READY = "harness.probe.Probe.gradients_ready"


def scale_gradient(name: str, scale: float, ordinary: Any, probe: Any, engine: Any) -> None:
    for piece in engine.local_shards("gradients"):
        if piece.name == name:
            piece.local.mul_(scale)
    ordinary(probe, engine)


@replaces(GRADIENTS_READY)
def halved(*arguments: Any) -> None:
    """Halve the gradient of one small parameter."""
    scale_gradient("layers.1.input_layernorm.weight", 0.5, *arguments)


SCALED_MATRIX = "layers.1.mlp.up_proj.weight"


def scale_by_precision(run_dir: str) -> float:
    """Return the smallest scale that the proof must not miss: 1.01 in fp32, and 1.1 in 16 bits."""
    return 1.01 if read_run_spec(Path(run_dir)).config.precision.compute == "float32" else 1.1


def gradient_scaled(run_dir: str, matrix: str = SCALED_MATRIX) -> None:
    """Scale the gradient of one matrix a little."""
    plant(functools.partial(scale_gradient, matrix, scale_by_precision(run_dir)), GRADIENTS_READY)
    worker_main.main(run_dir)


def embedding_gradient_scaled(run_dir: str) -> None:
    """Scale the gradient of the embedding a little: it has one summand for every token."""
    gradient_scaled(run_dir, "embed_tokens.weight")


def update_scaled(run_dir: str) -> None:
    """Scale the update of one matrix a little."""
    scale = scale_by_precision(run_dir)

    def updated_shards(engine: Any) -> list[Any]:
        pieces = [piece for piece in engine.local_shards("optimizer") if piece.state_name == "master"]
        pieces = pieces or list(engine.local_shards("parameters"))
        return [piece.local.detach() for piece in pieces if piece.name == SCALED_MATRIX]

    def spoiled(ordinary: Any, engine: Any, micro_batches: Any) -> Any:
        before = [piece.clone() for piece in updated_shards(engine)]
        result = ordinary(engine, micro_batches)
        for piece, old in zip(updated_shards(engine), before, strict=True):
            piece.copy_(old + scale * (piece - old))
        return result

    plant(spoiled, f"{TORCH}.engine.TorchEngine.step", "harness.engines.deepspeed.engine.DeepSpeedTrainEngine.step")
    worker_main.main(run_dir)


@replaces(f"{TORCH}.engine.reduce_partial_grad")
def norms_not_summed(_: Any, gradient: Any) -> Any:
    """Leave the gradients of norms as those of this rank's part of the sequence."""
    return unsummed(gradient)


@replaces(f"{TORCH}.engine.reduce_partial_grad")
def positions_not_summed(ordinary: Any, gradient: Any) -> Any:
    """Leave the gradients of learned positions as those of this rank's part of the sequence."""
    return unsummed(gradient) if gradient.dim() == 2 else ordinary(gradient)


def unsummed(gradient: Any) -> Any:
    if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)
    return gradient


@replaces(f"{TORCH}.engine.TorchEngine.reduce_loss_and_norm")
def norm_of_one_stage(ordinary: Any, self: Any, loss: Any, gradients: Any, squares: Any) -> Any:
    """Clip each stage by the norm of its own gradients."""
    known, _ = ordinary(self, loss, gradients, squares)
    return known, grad_norm.squared_grad_norm(gradients, squares, gradients[0].device).sqrt()


@replaces(f"{TORCH}.engine.clip_gradients", of_rank=1)
def clipped_elsewhere(*_: Any) -> None:
    """Leave out the clipping on rank 1."""


@replaces(f"{TORCH}.loss_scaler.LossScaler.unscale")
def scale_never_taken_out(*_: Any) -> None:
    """Leave gradients in fp16 multiplied by the loss scale."""


@replaces(f"{DEEPSPEED}.apply_tensor_parallel")
def autotp_not_marked(ordinary: Any, model: Any, *arguments: Any) -> Any:
    """Make DeepSpeed take sharded weights for copies, so that the global norm has those of one rank alone."""
    names = ordinary(model, *arguments)
    for parameter in model.parameters():
        parameter.tensor_model_parallel = False
    return names


# --- state


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
