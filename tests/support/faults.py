"""Planted faults, each of which spoils one part of a rank and then runs the worker unchanged.

Every rank is a process of its own, so the patches end with it.
"""

import dataclasses
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, loss

import harness.models.activation_checkpoint
import harness.models.build
import harness.models.decoder
import harness.models.init_weights
import harness.models.loss
from harness.config.checkpointing import CheckpointingConfig
from harness.engines import torch as torch_engine
from harness.engines.deepspeed import initialize as deepspeed_initialize
from harness.engines.torch import (
    context_parallel,
    ddp,
    engine,
    fsdp,
    grad_norm,
    loss_scaler,
    pipeline_parallel,
    tensor_parallel,
)
from harness.layout import partition
from harness.layout.layout import AXES
from harness.measure.allocation_logger import CpuAllocationLog
from harness.measure.communication import CommunicationCounter
from harness.models import activation_offload
from harness.probe import Probe
from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_spec import read_run_spec
from harness.worker import batches as rank_batches
from harness.worker import main as worker_main


def rank() -> int:
    return int(os.environ["RANK"])


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


def other_data(run_dir: str) -> None:
    """Train rank 1 on rank 0's sequences."""
    init = rank_batches.Batches.__init__

    def spoiled(self: Any, corpus: Any, config: Any, layout: Any, data_rank: int, device: Any) -> None:
        init(self, corpus, config, layout, 0, device)

    rank_batches.Batches.__init__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def summed(run_dir: str) -> None:
    """Sum gradients over ranks instead of averaging them."""
    wrap = ddp.distributed_data_parallel

    def all_reduce_sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations than its own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def spoiled(*arguments: Any) -> Any:
        def wrapped(model: Any) -> Any:
            module = wrap(*arguments)(model)
            module.register_comm_hook(None, all_reduce_sum)
            return module

        return wrapped

    ddp.distributed_data_parallel = spoiled
    worker_main.main(run_dir)


def halved(run_dir: str) -> None:
    """Halve the gradient of one small parameter."""
    ready = Probe.gradients_ready

    def spoiled(self: Probe, engine: Any) -> None:
        for piece in engine.local_shards("gradients"):
            if piece.name == "layers.1.input_layernorm.weight":
                piece.local.mul_(0.5)
        ready(self, engine)

    Probe.gradients_ready = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def unsynchronised(run_dir: str) -> None:
    """Never exchange the gradients of replicas."""
    micro_batch = ddp.ReplicatedParams.sync_context
    ddp.ReplicatedParams.sync_context = lambda self, last: micro_batch(self, last=False)  # type: ignore[assignment]
    worker_main.main(run_dir)


def uncounted(run_dir: str) -> None:
    """Make the counter miss one kind of operation."""
    count = CommunicationCounter._count

    def spoiled(self: Any, func: Any, args: Any, kwargs: Any) -> None:
        if "reduce_scatter" not in func._schema.name:
            count(self, func, args, kwargs)

    CommunicationCounter._count = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def never_recomputed(run_dir: str) -> None:
    """Leave out checkpointing."""
    harness.models.build.apply_checkpointing = lambda model, checkpointing, probe: None
    worker_main.main(run_dir)


def every_layer_recomputed(run_dir: str) -> None:
    """Checkpoint every layer, whatever is configured."""
    apply = harness.models.build.apply_checkpointing
    full = CheckpointingConfig("full")
    harness.models.build.apply_checkpointing = lambda model, checkpointing, probe: apply(model, full, probe)
    worker_main.main(run_dir)


def products_not_kept(run_dir: str) -> None:
    """Make selective checkpointing keep attention alone, so that every projection runs again."""
    aten = torch.ops.aten
    harness.models.activation_checkpoint.SAVED_OPS = frozenset(
        (aten._scaled_dot_product_flash_attention_for_cpu.default,)
    )
    worker_main.main(run_dir)


def parts_of_the_loss_kept(run_dir: str) -> None:
    """Keep every chunk's logits while the loss goes through its tokens in chunks."""
    apply = harness.models.build.apply_loss_chunks

    def spoiled(model: Any, chunks: int, probe: Any) -> None:
        apply(model, chunks, probe)
        del model.lm_head.chunk_loss

    harness.models.build.apply_loss_chunks = spoiled
    worker_main.main(run_dir)


def parts_of_the_loss_mixed(run_dir: str) -> None:
    """Match each chunk of the hidden states with the targets of another chunk.

    This is what happens if a rank's part of a sequence is taken for a whole sequence.
    """
    forward = harness.models.decoder.Head.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None, chunks: int = 1) -> Any:
        mixed = None if targets is None else targets.flatten().roll(targets.numel() // chunks)
        return forward(self, hidden, mixed, chunks)

    harness.models.decoder.Head.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def eager_on_one_rank(run_dir: str) -> None:
    """Compose rank 1's attention of plain operators."""
    build = harness.models.decoder.Attention.__init__

    def spoiled(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        self.eager = rank() == 1

    harness.models.decoder.Attention.__init__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def other_kernel_of_the_optimizer(run_dir: str) -> None:
    """Use the fused optimizer, whatever is configured."""
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda parameters, **keywords: adamw(
        parameters, **(keywords | {"fused": True, "foreach": False})
    )  # type: ignore[assignment,misc]
    worker_main.main(run_dir)


def never_compiled(run_dir: str) -> None:
    """Leave the layers uncompiled."""
    harness.models.build.apply_compile = lambda model, asked_for: None
    worker_main.main(run_dir)


def compiled_again(run_dir: str) -> None:
    """Throw away the compiled code in the first timed step."""

    def spoiled(self: Any, phase: str, step: int = 0) -> None:
        beat(self, phase, step)
        if phase == "timed":
            torch.compiler.reset()

    beat = HeartbeatWriter.__call__
    HeartbeatWriter.__call__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def other_optimizer(run_dir: str) -> None:
    """Use plain SGD in place of AdamW."""
    torch.optim.AdamW = lambda parameters, lr, **_: torch.optim.SGD(parameters, lr=lr)  # type: ignore[assignment,misc]
    worker_main.main(run_dir)


def not_finite(run_dir: str) -> None:
    """Make the loss NaN from the start."""
    loss_function = harness.models.loss.loss_function
    harness.models.loss.loss_function = lambda logits, targets: loss_function(logits, targets) * float("nan")
    worker_main.main(run_dir)


def tensor_parallel_dropped(run_dir: str) -> None:
    """Leave the model unsharded, so that every rank trains all of it."""
    tensor_parallel.apply_tensor_parallel = lambda model, mesh, sequence_parallel: None
    worker_main.main(run_dir)


def keys_in_other_order(run_dir: str) -> None:
    """Leave keys and values in the order of ranks instead of that of the sequence."""
    context_parallel.unshuffle_chunks = iter
    worker_main.main(run_dir)


def positions_from_the_start(run_dir: str) -> None:
    """Give every rank's part of a sequence the positions of the first part."""
    tables = harness.models.decoder.rotary_tables

    def spoiled(spans: Any, *arguments: Any) -> Any:
        return tables(((0, sum(stop - start for start, stop in spans)),), *arguments)

    harness.models.decoder.rotary_tables = spoiled
    worker_main.main(run_dir)


def own_keys_alone(run_dir: str) -> None:
    """Gather nothing for attention, so that a token attends only to its own rank's tokens."""
    context_parallel.apply_context_parallel = lambda model, group, spans: None
    worker_main.main(run_dir)


def replicas_apart(run_dir: str) -> None:
    """Never average gradients over the replicas of hybrid sharding."""
    alone = DeviceMesh._concatenate
    fsdp.hsdp_mesh = lambda mesh, layout: alone([mesh["pp"], mesh["dp_shard"]])
    worker_main.main(run_dir)


def sharding_over_all(run_dir: str) -> None:
    """Shard the parameters of hybrid sharding over the replicas too."""
    alone = DeviceMesh._concatenate
    fsdp.hsdp_mesh = lambda mesh, layout: alone([mesh["pp"], mesh["dp_replicate", "dp_shard"]._flatten()])
    worker_main.main(run_dir)


def rows_not_summed(run_dir: str) -> None:
    """Pass on a row-parallel layer's output without its all-reduce."""
    redistribute = DTensor.redistribute

    def spoiled(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.placements[0].is_partial() and self.ndim == 3:
            return DTensor.from_local(self.to_local(), self.device_mesh, keywords["placements"], run_check=False)
        return redistribute(self, *arguments, **keywords)

    DTensor.redistribute = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def vocabulary_shifted(run_dir: str) -> None:
    """Take each target for its neighbor in the loss over vocabulary-parallel logits."""
    loss_forward = loss._nll_loss_forward

    def shifted(x: Any, target: Any, *arguments: Any) -> Any:
        return loss_forward(x, (target + 1) % 256, *arguments)

    loss._nll_loss_forward = shifted
    worker_main.main(run_dir)


def whole_gradient(run_dir: str) -> None:
    """Use torch's own embedding sharded by rows, whose gradient is whole on every rank."""
    tensor_parallel.VocabularyParallelEmbedding = lambda output: RowwiseParallel(  # type: ignore[assignment,misc]
        input_layouts=Replicate(), output_layouts=output
    )
    worker_main.main(run_dir)


def norms_not_summed(run_dir: str) -> None:
    """Leave the gradients of norms as those of this rank's part of the sequence."""
    engine.reduce_partial_grad = unsummed
    worker_main.main(run_dir)


def unsummed(gradient: Any) -> Any:
    if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)
    return gradient


def other_weights(run_dir: str) -> None:
    """Start the last stage from the weights of other layers."""
    initial_value = harness.models.init_weights.initial_value

    def spoiled(name: str, *arguments: Any) -> Any:
        return initial_value(name.replace("layers.3.", "layers.2."), *arguments)

    harness.models.init_weights.initial_value = spoiled
    worker_main.main(run_dir)


def other_layers(run_dir: str) -> None:
    """Give both stages the same layers."""
    ordinary = partition.stages_of_rank

    def spoiled(model: Any, layout: Any, number: int) -> Any:
        return [dataclasses.replace(stage, first_layer=0) for stage in ordinary(model, layout, number)]

    partition.stages_of_rank = spoiled
    worker_main.main(run_dir)


def other_schedule(run_dir: str) -> None:
    """Run GPipe in place of 1F1B, which trains the same but keeps every micro-batch."""
    pipeline_parallel.SINGLE_STAGE_SCHEDULES["1f1b"] = pipeline_parallel.ScheduleGPipe
    worker_main.main(run_dir)


def norm_of_one_stage(run_dir: str) -> None:
    """Clip each stage by the norm of its own gradients."""
    totals = engine.TorchEngine.reduce_loss_and_norm

    def spoiled(self: Any, loss: Any, gradients: Any) -> Any:
        known, _ = totals(self, loss, gradients)
        return known, grad_norm.squared_grad_norm(gradients, gradients[0].device).sqrt()

    engine.TorchEngine.reduce_loss_and_norm = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def boundary_sent_twice(run_dir: str) -> None:
    """Send every activation to the next stage a second time."""
    send_ops = pipeline_parallel.PipelineStage.get_fwd_send_ops
    receive_ops = pipeline_parallel.PipelineStage.get_fwd_recv_ops
    pipeline_parallel.PipelineStage.get_fwd_send_ops = lambda self, chunk: 2 * send_ops(self, chunk)  # type: ignore[method-assign]
    pipeline_parallel.PipelineStage.get_fwd_recv_ops = lambda self, chunk: 2 * receive_ops(self, chunk)  # type: ignore[method-assign]
    worker_main.main(run_dir)


def sequence_whole(run_dir: str) -> None:
    """Leave out sequence parallelism, so that the same sums are sent as all-reduces."""
    apply = tensor_parallel.apply_tensor_parallel
    tensor_parallel.apply_tensor_parallel = lambda model, mesh, sequence_parallel: apply(model, mesh, False)
    worker_main.main(run_dir)


def norms_drift(run_dir: str) -> None:
    """Never update rank 1's copies of the norms."""
    publish = ddp.ReplicatedParams.sync_model_params

    def spoiled(self: Any) -> None:
        with torch.no_grad():
            for name in self.parameters if rank() == 1 else ():
                if "norm" in name:
                    self.master_param(name).fill_(1.0)
        publish(self)

    ddp.ReplicatedParams.sync_model_params = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def clipped_elsewhere(run_dir: str) -> None:
    """Leave out the clipping on rank 1."""
    if rank() == 1:
        engine.clip_gradients = lambda gradients, total, most: None
    worker_main.main(run_dir)


def weights_not_put_off(run_dir: str) -> None:
    """Compute the weights' gradients in zero bubble's backward for inputs as well."""
    backward = pipeline_parallel.PipelineStage.backward_one_chunk

    def spoiled(self: Any, chunk: int, loss: Any = None, full: bool = True, last_backward: bool = False) -> None:
        backward(self, chunk, loss, True, last_backward)

    pipeline_parallel.PipelineStage.backward_one_chunk = spoiled  # type: ignore[method-assign]
    pipeline_parallel.PipelineStage.backward_weight_one_chunk = lambda self, chunk, last_backward=False: None  # type: ignore[method-assign]
    worker_main.main(run_dir)


def whole_model_built(run_dir: str) -> None:
    """Make all of the model's weights on a stage before those of other stages are freed."""
    build = harness.models.build.build_model

    def spoiled(model: Any, stage: Any = None) -> Any:
        harness.models.init_weights.materialize(build(model), model, 0, torch.device("cpu"), torch.float32)
        return build(model, stage)

    harness.models.build.build_model = spoiled
    worker_main.main(run_dir)


def loss_of_its_own(run_dir: str) -> None:
    """Report another loss on each rank, with the right mean."""
    step = engine.TorchEngine.step

    def spoiled(self: Any, micro_batches: Any) -> Any:
        result = step(self, micro_batches)
        return result._replace(loss=result.loss * (1.5 - rank()))

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


SLOW_SECONDS = 0.05


def slow_last_stage(run_dir: str) -> None:
    """Delay every forward of the last stage, so that the other stages wait for it; this is not a fault."""
    forward = harness.models.decoder.Decoder.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        time.sleep(SLOW_SECONDS if self.lm_head is not None else 0)
        return forward(self, hidden, targets)

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def slow_steps(run_dir: str) -> None:
    """Delay every step by more than a second; this is not a fault."""
    step = engine.TorchEngine.step

    def spoiled(self: Any, micro_batches: Any) -> Any:
        time.sleep(1.2)
        return step(self, micro_batches)

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def slow_rank(run_dir: str) -> None:
    """Delay every forward on rank 1; this is not a fault."""
    forward = harness.models.decoder.Decoder.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        time.sleep(SLOW_SECONDS if rank() == 1 else 0)
        return forward(self, hidden, targets)

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def layer_twice(run_dir: str) -> None:
    """Run every layer a second time in forward for nothing; losses and gradients are right."""
    forward = harness.models.decoder.Block.forward

    def spoiled(self: Any, *arguments: Any) -> Any:
        with torch.no_grad():
            forward(self, *arguments)
        return forward(self, *arguments)

    harness.models.decoder.Block.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def block_unlogged(run_dir: str) -> None:
    """Leave one of the blocks alive at the peak out of the memory log."""
    end = CpuAllocationLog.end

    def spoiled(self: Any) -> Any:
        log = end(self)
        missing = int(log.bytes[: self.initial_count].argmax())
        log.bytes[missing] = 1
        return log

    CpuAllocationLog.end = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def exhausted(run_dir: str) -> None:
    """Ask for more memory than there is on rank 1, in its second step."""

    def spoiled(self: Any, step: int) -> Any:
        if rank() == 1 and step == 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        return batches(self, step)

    batches = rank_batches.Batches.__call__
    rank_batches.Batches.__call__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def exhausted_in_a_stage(run_dir: str) -> None:
    """Ask for more memory than there is on rank 1, inside the model's forward."""
    forward = harness.models.decoder.Decoder.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        if rank() == 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        return forward(self, hidden, targets)

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def killed(run_dir: str) -> None:
    """Kill rank 1 while it trains, as if from outside."""

    def spoiled(self: Any, step: int) -> Any:
        if rank() == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches(self, step)

    batches = rank_batches.Batches.__call__
    rank_batches.Batches.__call__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def stuck(run_dir: str) -> None:
    """Keep rank 1 from ever taking part."""
    if rank() == 1:
        Path(run_dir, "stuck").touch()
        time.sleep(3600)
    worker_main.main(run_dir)


def stuck_in_a_step(run_dir: str) -> None:
    """Stop rank 1 in its second step."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def waiting(self: Any, micro_batches: Any) -> Any:
        if rank() == 1 and next(step_numbers) == 1:
            time.sleep(3600)
        return step(self, micro_batches)

    engine.TorchEngine.step = waiting  # type: ignore[method-assign]
    worker_main.main(run_dir)


def greedy(run_dir: str) -> None:
    """Touch more and more host memory in rank 1's second step, until the process is stopped."""
    step = engine.TorchEngine.step
    step_numbers, blocks = itertools.count(), []

    def hungry(self: Any, micro_batches: Any) -> Any:
        if rank() == 1 and next(step_numbers) == 1:
            while True:
                blocks.append(b"1" * 2**24)
        return step(self, micro_batches)

    engine.TorchEngine.step = hungry  # type: ignore[method-assign]
    worker_main.main(run_dir)


def masks_of_their_own(run_dir: str) -> None:
    """Drop different parts of the residual stream that tensor-parallel ranks share."""
    worker_main.dropout_seed = lambda seed, layout, number: seed + number
    worker_main.main(run_dir)


def heads_drop_alike(run_dir: str) -> None:
    """Drop the same elements of attention on tensor-parallel ranks, which have different heads."""
    apply = tensor_parallel.apply_tensor_parallel

    def spoiled(model: Any, *arguments: Any) -> None:
        apply(model, *arguments)
        for block in model.layers_by_index().values():
            block.self_attn.dropout_rng_rank = None

    tensor_parallel.apply_tensor_parallel = spoiled
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


def never_broadcast(run_dir: str) -> None:
    """Step each rank's share in ZeroRedundancyOptimizer without broadcasting it."""
    ZeroRedundancyOptimizer._sync_params = lambda self: None  # type: ignore[method-assign]
    worker_main.main(run_dir)


def scale_never_taken_out(run_dir: str) -> None:
    """Leave gradients in fp16 multiplied by the loss scale."""
    loss_scaler.LossScaler.unscale = lambda self, gradients: None  # type: ignore[method-assign]
    worker_main.main(run_dir)


def masks_alike(run_dir: str) -> None:
    """Use the same dropout masks on ranks with different data."""
    worker_main.dropout_seed = lambda seed, layout, number: seed
    worker_main.main(run_dir)


def bias_summed_twice(run_dir: str) -> None:
    """Add a row-parallel layer's bias once more, after the sum over the ranks."""
    apply = tensor_parallel.apply_tensor_parallel

    def spoiled(model: Any, *arguments: Any) -> None:
        apply(model, *arguments)
        for block in model.layers_by_index().values():
            for row in (block.self_attn.o_proj, block.mlp.down_proj):
                row.register_forward_hook(lambda module, _, output: output + module.bias.to_local())

    tensor_parallel.apply_tensor_parallel = spoiled
    worker_main.main(run_dir)


def positions_not_summed(run_dir: str) -> None:
    """Leave the gradients of learned positions as those of this rank's part of the sequence."""
    ordinary = grad_norm.reduce_partial_grad
    engine.reduce_partial_grad = lambda gradient: unsummed(gradient) if gradient.dim() == 2 else ordinary(gradient)
    worker_main.main(run_dir)


def layer_of_library_twice(run_dir: str) -> None:
    """Run every layer of a library's model a second time in forward, for nothing."""
    from harness.models import hf_library

    build = hf_library.build_hf_model

    def spoiled(model: Any) -> Any:
        built = build(model)
        for block in built.layers_by_index().values():
            block.forward = twice(block.forward)
        return built

    hf_library.build_hf_model = spoiled
    worker_main.main(run_dir)


def twice(forward: Any) -> Any:
    def spoiled(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            forward(*arguments, **keywords)
        return forward(*arguments, **keywords)

    return spoiled


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


def stale_copy(run_dir: str) -> None:
    """Take a copy on the host for that of every tensor of its size."""

    def spoiled(self: Any, tensor: Any) -> Any:
        size = tensor.untyped_storage().nbytes()
        if size not in self.copies:
            self.kept = [*getattr(self, "kept", []), host_copy := activation_offload.HostCopy(tensor)]
            self.copies[size] = host_copy
            self.probe.offloaded(host_copy.host)
        return self.copies[size]

    activation_offload.OffloadHooks.copy_once = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def autotp_rows_not_summed(run_dir: str) -> None:
    """Leave out the sum over the ranks in DeepSpeed's row-parallel layers."""
    from deepspeed.module_inject import layers

    layers.RowParallel.forward = staticmethod(lambda ctx, group, input, inference: input)
    worker_main.main(run_dir)


def autotp_not_marked(run_dir: str) -> None:
    """Make DeepSpeed take sharded weights for copies, so that the global norm has those of one rank alone."""
    apply = deepspeed_initialize.apply_tensor_parallel

    def spoiled(model: Any, *arguments: Any) -> Any:
        names = apply(model, *arguments)
        for parameter in model.parameters():
            parameter.tensor_model_parallel = False
        return names

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


def autotp_dropped(run_dir: str) -> None:
    """Train the whole model on every rank, and sum nothing."""

    def spoiled(model: Any, *_: Any) -> Any:
        model.ds_autotp_parsed = True
        return {}

    deepspeed_initialize.apply_tensor_parallel = spoiled
    worker_main.main(run_dir)


def collective_mismatched(run_dir: str) -> None:
    """Call another collective on rank 1 than on the other ranks, in the second step."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def spoiled(self: Any, micro_batches: Any) -> Any:
        if next(step_numbers) == 1:
            dist.all_reduce(torch.zeros(8 if rank() == 1 else 2))
        return step(self, micro_batches)

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def nan_later(run_dir: str) -> None:
    """Make the loss NaN from the third step on."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def spoiled(self: Any, micro_batches: Any) -> Any:
        result = step(self, micro_batches)
        return result._replace(loss=result.loss * float("nan")) if next(step_numbers) >= 2 else result

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def each_its_own(run_dir: str) -> None:
    """Make one run of a sweep hang, one run out of memory and one lose its loss to NaN; leave one as it is."""
    layout = read_run_spec(Path(run_dir)).layout
    faults = {(1, 2, 1): exhausted, (2, 1, 1): stuck_in_a_step, (1, 1, 2): nan_later}
    faults.get((layout.dp_shard, layout.dp_replicate, layout.tp), worker_main.main)(run_dir)
