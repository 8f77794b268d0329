"""The shards that a rank really holds under DeepSpeed's three ZeRO optimizers, as views into their buffers.

DeepSpeed 0.19.8 has three layouts:
    stage 3 partitions every parameter into equal parts, the last one padded;
    stages 1 and 2 concatenate all parameters and partition the result, so that a part may start inside a parameter;
    stage 1 in bf16_mixed (BF16_Optimizer) does so for masters and moments alone.

Masters and moments lie on the host in the same layout under strategy.offload, and so do the gradients that AdamW reads:
these are separate buffers for the whole run, into which each gradient is copied when it is reduced and summed.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.optimizer import STATE_NAMES
from harness.engines.deepspeed.shards import ParamSlices
from harness.layout.state_widths import StateKind
from harness.tensors.shard import GATHERED, STAGING, Shard

# The gradients of parameters by the parameter's identity: a buffer that stays for the whole run, and its shards.
ShardCache = dict[int, tuple[Tensor, list[Shard]]]


class OwnedSlice(NamedTuple):
    """This rank's part of one parameter: [start, stop) of the flattened one, at `offset` in buffer number `group`."""

    parameter: Tensor
    numel: int
    start: int
    stop: int
    group: int
    offset: int

    def shards(self, param_slices: ParamSlices, local: Tensor, state_name: str = "") -> Iterator[Shard]:
        """Yield `local`, which holds this part's values, as shards of the plain model's parameter."""
        param_slice = param_slices[id(self.parameter)]
        for start, stop, shape, box in param_slice.boxes(self.start, self.stop):
            part = local.view(-1)[start - self.start : stop - self.start]
            yield Shard(param_slice.name, part.view([b - a for a, b in box]), shape, box, state_name)

    def view_in(self, buffer: Tensor) -> Tensor:
        """Return the view of this part in a buffer that has the same layout as the masters."""
        return buffer.narrow(0, self.offset, self.stop - self.start)


def local_shards(
    kind: StateKind, model: nn.Module, optimizer: Any, param_slices: ParamSlices, cache: ShardCache
) -> Iterator[Shard]:
    """Yield the shards of a kind of state that this rank holds now; see Engine.local_shards.

    The optimizer knows trained parameters alone. `cache` belongs to the engine, and keeps what need not be made again.
    """
    if kind == "parameters":
        yield from parameter_shards(model, optimizer, param_slices)
    elif kind == "gradients":
        yield from gradient_shards(optimizer, param_slices, cache)
    else:
        yield from master_shards(optimizer, param_slices)
        yield from moment_shards(optimizer, param_slices)


def parameter_shards(model: nn.Module, optimizer: Any, param_slices: ParamSlices) -> Iterator[Shard]:
    """Yield this rank's parameters: in stage 3 its partitions, and the parameters that are gathered at present."""
    parameters: list[Any] = list(model.parameters())
    if not is_stage_3(optimizer):
        yield from (full_shard(parameter, parameter.detach(), param_slices) for parameter in parameters)
        return
    for parameter in parameters:
        for owned in partitions(optimizer, parameter):
            yield from owned.shards(param_slices, parameter.ds_tensor.narrow(0, 0, owned.stop - owned.start))
        if parameter.ds_status.name == "AVAILABLE":
            yield full_shard(parameter, parameter.detach(), param_slices, GATHERED)


def partitions(optimizer: Any, parameter: Any, group: int = 0, offset: int = 0) -> Iterator[OwnedSlice]:
    """Yield stage 3's part of a parameter on this rank, unless it is all padding, at this place in the buffers."""
    rank, size = dist.get_rank(optimizer.dp_process_group), parameter.partition_numel()
    start, stop = (min(edge * size, parameter.ds_numel) for edge in (rank, rank + 1))
    if start < stop:
        yield OwnedSlice(parameter, parameter.ds_numel, start, stop, group, offset)


def gradient_shards(optimizer: Any, param_slices: ParamSlices, cache: ShardCache) -> Iterator[Shard]:
    """Yield this rank's gradients, and copies of them that are not freed yet."""
    if is_stage_3(optimizer):
        for owned in owned_slices(optimizer):
            # Stage 3 keeps one flat buffer for the whole run, also between steps.
            buffer, _ = optimizer._get_fp32_grad_state_partition(owned.parameter, release_swap_buffers=False)
            yield from cached_shards(cache, owned, param_slices, buffer)
        yield from stage_3_accumulation_shards(optimizer, param_slices)
    elif host_state_kinds(optimizer):
        yield from offloaded_gradient_shards(optimizer, param_slices)
    elif is_bf16_stage_1(optimizer):
        for parameter, total in zip(all_parameters(optimizer), optimizer.fp32_groups_gradients[0], strict=True):
            yield full_shard(parameter, total.view(parameter.shape), param_slices)
            if parameter.grad is not None:
                yield full_shard(parameter, parameter.grad, param_slices, STAGING)
    else:
        yield from flat_gradient_shards(optimizer, param_slices)


def cached_shards(cache: ShardCache, owned: OwnedSlice, param_slices: ParamSlices, buffer: Tensor) -> list[Shard]:
    """Return the shards of a gradient's buffer, of which a profiled step asks for those of all layers in each layer.

    Where gradients are offloaded DeepSpeed returns another view each time, whose shards are made anew.
    """
    known = cache.get(id(owned.parameter))
    if known is None or known[0] is not buffer:
        shards = list(owned.shards(param_slices, buffer.narrow(0, 0, owned.stop - owned.start)))
        known = cache[id(owned.parameter)] = (buffer, shards)
    return known[1]


def stage_3_accumulation_shards(optimizer: Any, param_slices: ParamSlices) -> Iterator[Shard]:
    """Yield the sums over micro-batches that stage 3 copies, under offload, to the gradients that AdamW reads."""
    if host_state_kinds(optimizer):
        sums, offset = optimizer.grad_partitions_flat_buffer, 0
        owned_by_id = {id(owned.parameter): owned for owned in owned_slices(optimizer)}
        for parameter in all_parameters(optimizer):
            if owned := owned_by_id.get(id(parameter)):
                yield from owned.shards(param_slices, sums.narrow(0, offset, owned.stop - owned.start), STAGING)
            offset += parameter.partition_numel()


def offloaded_gradient_shards(optimizer: Any, param_slices: ParamSlices) -> Iterator[Shard]:
    """Yield gradients of stages 1 and 2 under offload: this rank's part as AdamW reads it, and those not yet copied."""
    partition = list(owned_slices(optimizer))
    flat: Any = master_buffers(optimizer)[0].grad
    for owned in partition:
        yield from owned.shards(param_slices, owned.view_in(flat))
    on_device: Any = getattr(optimizer.averaged_gradients.get(0), "flat_partition", None)
    for owned in partition if on_device is not None else ():
        yield from owned.shards(param_slices, owned.view_in(on_device), STAGING)
    yield from unreduced_shards(optimizer, param_slices, optimizer.accumulated_grads_in_cpu, STAGING)


def unreduced_shards(
    optimizer: Any, param_slices: ParamSlices, host_sums: Mapping[int, Tensor], state_name: str
) -> Iterator[Shard]:
    """Yield whole gradients of stages 1 and 2 that are not yet reduced.

    One that was copied to a bucket is a view of it, which the next gradient overwrites.
    """
    in_buckets = {bucket.untyped_storage().data_ptr() for bucket in reduction_buckets(optimizer)}
    for parameter in all_parameters(optimizer):
        host_sum = host_sums.get(optimizer.get_param_id(parameter))
        for gradient in (parameter.grad, parameter.grad_accum, host_sum):
            if gradient is not None and gradient.untyped_storage().data_ptr() not in in_buckets:
                yield full_shard(parameter, gradient.view(parameter.shape), param_slices, state_name)


def flat_gradient_shards(optimizer: Any, param_slices: ParamSlices) -> Iterator[Shard]:
    """Yield gradients of stages 1 and 2: whole until they are reduced, then this rank's part.

    That part is summed over micro-batches.
    """
    partition = list(owned_slices(optimizer))
    reduced = optimizer.averaged_gradients.get(0) or []
    # Stage 2 keeps fp32 sums between micro-batches, each as long as the parameter that this rank's part overlaps.
    sums = optimizer.all_grad_tensors.get(0) or []
    if partition and reduced:
        for owned, tensor in zip(partition, without_padding(optimizer, partition, reduced), strict=True):
            yield from owned.shards(param_slices, tensor)
    elif partition and sums:
        for owned, tensor in zip(partition, sums, strict=True):
            yield from owned.shards(param_slices, tensor.view(-1)[owned.start : owned.stop])
    yield from unreduced_shards(optimizer, param_slices, {}, STAGING if reduced or sums else "")
    flat = master_buffers(optimizer)[0].grad  # set only while AdamW runs
    if flat is not None and not reduced:
        for owned in partition:
            yield from owned.shards(param_slices, owned.view_in(flat))


def without_padding(optimizer: Any, partition: Sequence[OwnedSlice], reduced: Sequence[Tensor]) -> list[Tensor]:
    """Return the reduced gradients of this rank's parts, in their order.

    DeepSpeed marks padding between parameters, but in stages 1 and 2 not the padding behind the last one, which fills
    the partition (_get_flat_partition_unpadded). Raises RuntimeError if the gradients do not fit the parts.
    """
    gradients = [tensor for tensor in reduced if not getattr(tensor, "_zero_padding", False)][: len(partition)]
    sizes = [owned.stop - owned.start for owned in partition]
    partition_size = master_buffers(optimizer)[0].numel()
    if [tensor.numel() for tensor in gradients] != sizes or sum(map(torch.numel, reduced)) != partition_size:
        raise RuntimeError(
            f"DeepSpeed reduced gradients of {[tensor.numel() for tensor in reduced]} elements for parts of {sizes}"
            f" elements in a partition of {partition_size}"
        )
    return gradients


def reduction_buckets(optimizer: Any) -> Iterator[Tensor]:
    """Yield the buffers into which gradients are copied to be reduced; BF16_Optimizer has none."""
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buffers = [bucket.buffer] if is_stage_3(optimizer) else bucket.buffer
        yield from (buffer for buffer in buffers if buffer is not None)


def offload_buffers(optimizer: Any) -> Iterator[Tensor]:
    """Yield the buffers through which stages 1 and 2 copy gradients and parameters between device and host."""
    if host_state_kinds(optimizer) and not is_stage_3(optimizer):
        yield optimizer.temp_grad_buffer_for_gpu_offload
        yield optimizer.temp_grad_buffer_for_cpu_offload
        yield from optimizer.param_buffer_of_bit16_for_cpu_offload_groups


def host_state_kinds(optimizer: Any) -> tuple[StateKind, ...]:
    """Return the kinds of state that this optimizer was built to keep on the host."""
    if not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)):
        return ()
    kinds: tuple[StateKind, ...] = ("gradients", "optimizer")
    return ("parameters", *kinds) if getattr(optimizer, "offload_param", False) else kinds


def master_shards(optimizer: Any, param_slices: ParamSlices) -> Iterator[Shard]:
    """Yield this rank's fp32 masters."""
    buffers = master_buffers(optimizer)
    for owned in owned_slices(optimizer):
        yield from owned.shards(param_slices, owned.view_in(buffers[owned.group].detach()), "master")


def moment_shards(optimizer: Any, param_slices: ParamSlices) -> Iterator[Shard]:
    """Yield this rank's moments; there are none before the first step."""
    buffers = master_buffers(optimizer)
    for owned in owned_slices(optimizer):
        state = optimizer.optimizer.state.get(buffers[owned.group], {})
        for moment in STATE_NAMES:
            if moment in state:
                yield from owned.shards(param_slices, owned.view_in(state[moment]), moment)


def full_shard(parameter: Any, local: Tensor, param_slices: ParamSlices, state_name: str = "") -> Shard:
    """Return the shard that covers all that this rank's model has of a parameter."""
    param_slice = param_slices[id(parameter)]
    return Shard(param_slice.name, local, param_slice.shape, param_slice.box, state_name)


def owned_slices(optimizer: Any) -> Iterator[OwnedSlice]:
    """Yield this rank's parts in the order of its buffers, without those that are all padding."""
    if is_stage_3(optimizer):
        for parameter in all_parameters(optimizer):
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            yield from partitions(optimizer, parameter, group, offset)
        return
    rank = dist.get_rank(optimizer.real_dp_process_group[0])
    size = master_buffers(optimizer)[0].numel()
    if is_bf16_stage_1(optimizer):
        ordered = optimizer.bf16_groups[0]
        offsets = list(accumulate((parameter.numel() for parameter in ordered), initial=0))[:-1]
    else:
        ordered, offsets = optimizer.round_robin_bit16_groups[0], optimizer.round_robin_bit16_offsets[0]
    for parameter, offset in zip(ordered, offsets, strict=True):
        numel = parameter.numel()
        start, stop = (min(max(edge * size - offset, 0), numel) for edge in (rank, rank + 1))
        if start < stop:
            yield OwnedSlice(parameter, numel, start, stop, 0, offset + start - rank * size)


def all_parameters(optimizer: Any) -> list[Any]:
    """Return every trained parameter of the model, partitioned or not."""
    if is_stage_3(optimizer):
        return [parameter for group in optimizer.fp16_groups for parameter in group]
    groups = optimizer.bf16_groups if is_bf16_stage_1(optimizer) else optimizer.bit16_groups
    return list(groups[0])


def master_buffers(optimizer: Any) -> list[Tensor]:
    """Return the flat buffers of masters that AdamW updates; stage 3 has one for each sub-group."""
    if is_stage_3(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    if is_bf16_stage_1(optimizer):
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def is_stage_3(optimizer: Any) -> bool:
    """Return whether this is DeepSpeed's optimizer of stage 3."""
    return hasattr(optimizer, "fp16_partitioned_groups_flat")


def is_bf16_stage_1(optimizer: Any) -> bool:
    """Return whether this is DeepSpeed's BF16_Optimizer."""
    return hasattr(optimizer, "bf16_groups")
