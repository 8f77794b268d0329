"""What a rank really holds under DeepSpeed's three ZeRO optimizers, as views into the buffers that it keeps.

Three layouts, of DeepSpeed 0.19.8:
    stage 3 cuts every parameter into equal parts, the last one padded;
    stages 1 and 2 lay all parameters end to end and cut the whole, so that a part may begin inside a parameter;
    stage 1 in bf16_mixed (BF16_Optimizer) does so for masters and moments alone.

With strategy.offload masters and moments lie on the host in the same layout, and so do the gradients that AdamW reads:
buffers of their own, there for the whole run, to which each is copied when it is reduced and summed.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from harness.engines.deepspeed.shards import ParamSlices
from harness.layout.state_widths import StateKind
from harness.tensors.shard import GATHERED, STAGING, Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


class OwnedSlice(NamedTuple):
    """This rank's part of one parameter: [start, stop) of it flattened, from `at` in the buffer numbered `group`."""

    parameter: Tensor
    numel: int
    start: int
    stop: int
    group: int
    offset: int

    def shards(self, names: ParamSlices, local: Tensor, slot: str = "") -> Iterator[Shard]:
        shard = names[id(self.parameter)]
        for start, stop, shape, box in shard.boxes(self.start, self.stop):
            part = local.view(-1)[start - self.start : stop - self.start]
            yield Shard(shard.name, part.view([b - a for a, b in box]), shape, box, slot)

    def view_in(self, buffer: Tensor) -> Tensor:
        """The view of this cut in a buffer laid out as the masters are."""
        return buffer.narrow(0, self.offset, self.stop - self.start)


def local_shards(kind: StateKind, optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    """See Engine.pieces."""
    if kind == "parameters":
        yield from parameter_shards(optimizer, names)
    elif kind == "gradients":
        yield from gradient_shards(optimizer, names)
    else:
        yield from master_shards(optimizer, names)
        yield from moment_shards(optimizer, names)


def parameter_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    if not is_stage_3(optimizer):
        yield from (full_shard(parameter, parameter.detach(), names) for parameter in all_parameters(optimizer))
        return
    for cut in owned_slices(optimizer):
        parameter: Any = cut.parameter
        yield from cut.shards(names, parameter.ds_tensor.narrow(0, 0, cut.stop - cut.start))
    for parameter in all_parameters(optimizer):
        if parameter.ds_status.name == "AVAILABLE":
            yield full_shard(parameter, parameter.detach(), names, GATHERED)


def gradient_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    if is_stage_3(optimizer):
        for cut in owned_slices(optimizer):
            # One flat buffer for the whole run, at rest too.
            buffer, _ = optimizer._get_fp32_grad_state_partition(cut.parameter, release_swap_buffers=False)
            yield from cut.shards(names, buffer.narrow(0, 0, cut.stop - cut.start))
        yield from stage_3_accumulation_shards(optimizer, names)
    elif host_state_kinds(optimizer):
        yield from offloaded_gradient_shards(optimizer, names)
    elif is_bf16_stage_1(optimizer):
        for parameter, total in zip(all_parameters(optimizer), optimizer.fp32_groups_gradients[0], strict=True):
            yield full_shard(parameter, total.view(parameter.shape), names)
            if parameter.grad is not None:
                yield full_shard(parameter, parameter.grad, names, STAGING)
    else:
        yield from flat_gradient_shards(optimizer, names)


def stage_3_accumulation_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    """Offloaded, what micro-batches add up in, before it is copied to what AdamW reads."""
    if host_state_kinds(optimizer):
        sums, at = optimizer.grad_partitions_flat_buffer, 0
        mine = {id(cut.parameter): cut for cut in owned_slices(optimizer)}
        for parameter in all_parameters(optimizer):
            if cut := mine.get(id(parameter)):
                yield from cut.shards(names, sums.narrow(0, at, cut.stop - cut.start), STAGING)
            at += parameter.partition_numel()


def offloaded_gradient_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    """Gradients of stages 1 and 2, offloaded: this rank's part as AdamW reads it, and what is on its way there."""
    mine = list(owned_slices(optimizer))
    flat: Any = master_buffers(optimizer)[0].grad
    for cut in mine:
        yield from cut.shards(names, cut.view_in(flat))
    summed = optimizer.accumulated_grads_in_cpu
    on_device = getattr(optimizer.averaged_gradients.get(0), "flat_partition", None)
    in_buckets = {bucket.untyped_storage().data_ptr() for bucket in reduction_buckets(optimizer)}
    for cut in mine:
        if on_device is not None:
            yield from cut.shards(names, cut.view_in(on_device), STAGING)
    for parameter in all_parameters(optimizer):
        sums = summed.get(optimizer.get_param_id(parameter))
        for gradient in (parameter.grad, parameter.grad_accum, sums):
            if gradient is not None and gradient.untyped_storage().data_ptr() not in in_buckets:
                yield full_shard(parameter, gradient.view(parameter.shape), names, STAGING)


def flat_gradient_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    """Gradients of stages 1 and 2: whole while not reduced, then this rank's part, summed over micro-batches."""
    mine = list(owned_slices(optimizer))
    reduced = optimizer.averaged_gradients.get(0) or []
    # Between micro-batches stage 2 keeps its fp32 sums as long as the parameters that its part touches.
    sums = optimizer.all_grad_tensors.get(0) or []
    if mine and reduced:
        real = [tensor for tensor in reduced if not getattr(tensor, "_zero_padding", False)]
        for cut, tensor in zip(mine, real, strict=True):
            yield from cut.shards(names, tensor)
    elif mine and sums:
        for cut, tensor in zip(mine, sums, strict=True):
            yield from cut.shards(names, tensor.view(-1)[cut.start : cut.stop])
    slot = STAGING if reduced or sums else ""
    in_buckets = {bucket.untyped_storage().data_ptr() for bucket in reduction_buckets(optimizer)}
    for parameter in all_parameters(optimizer):
        for gradient in (parameter.grad, parameter.grad_accum):
            # Once copied to a bucket a gradient is a view of it, overwritten by the next.
            if gradient is not None and gradient.untyped_storage().data_ptr() not in in_buckets:
                yield full_shard(parameter, gradient, names, slot)
    flat = master_buffers(optimizer)[0].grad  # while AdamW runs
    if flat is not None and not reduced:
        for cut in mine:
            yield from cut.shards(names, cut.view_in(flat))


def reduction_buckets(optimizer: Any) -> Iterator[Tensor]:
    """The buffers into which gradients are copied to be reduced; BF16_Optimizer has none."""
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        if is_stage_3(optimizer):
            if bucket.buffer is not None:
                yield bucket.buffer
        else:
            yield from bucket.buffer


def offload_buffers(optimizer: Any) -> Iterator[Tensor]:
    """Buffers of stages 1 and 2 through which gradients and parameters go to the host and back."""
    if host_state_kinds(optimizer) and not is_stage_3(optimizer):
        yield optimizer.temp_grad_buffer_for_gpu_offload
        yield optimizer.temp_grad_buffer_for_cpu_offload
        yield from optimizer.param_buffer_of_bit16_for_cpu_offload_groups


def host_state_kinds(optimizer: Any) -> tuple[StateKind, ...]:
    """What this optimizer was built to keep on the host."""
    if not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)):
        return ()
    state: tuple[StateKind, ...] = ("gradients", "optimizer")
    return ("parameters", *state) if getattr(optimizer, "offload_param", False) else state


def master_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    buffers = master_buffers(optimizer)
    for cut in owned_slices(optimizer):
        yield from cut.shards(names, cut.view_in(buffers[cut.group].detach()), "master")


def moment_shards(optimizer: Any, names: ParamSlices) -> Iterator[Shard]:
    """AdamW's moments; none before the first step."""
    buffers = master_buffers(optimizer)
    for cut in owned_slices(optimizer):
        state = optimizer.optimizer.state.get(buffers[cut.group], {})
        for slot in MOMENTS:
            if slot in state:
                yield from cut.shards(names, cut.view_in(state[slot]), slot)


def full_shard(parameter: Any, local: Tensor, names: ParamSlices, slot: str = "") -> Shard:
    """All that this rank's model has of a parameter."""
    shard = names[id(parameter)]
    return Shard(shard.name, local, shard.shape, shard.box, slot)


def owned_slices(optimizer: Any) -> Iterator[OwnedSlice]:
    """This rank's parts, in the order in which they lie in its buffers; a part that is all padding is left out."""
    if is_stage_3(optimizer):
        rank = dist.get_rank(optimizer.dp_process_group)
        for parameter in all_parameters(optimizer):
            group, at, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, stop = (min(edge * part, parameter.ds_numel) for edge in (rank, rank + 1))
            if start < stop:
                yield OwnedSlice(parameter, parameter.ds_numel, start, stop, group, at)
        return
    rank = dist.get_rank(optimizer.real_dp_process_group[0])
    part = master_buffers(optimizer)[0].numel()
    if is_bf16_stage_1(optimizer):
        ordered = optimizer.bf16_groups[0]
        offsets = list(accumulate((parameter.numel() for parameter in ordered), initial=0))[:-1]
    else:
        ordered, offsets = optimizer.round_robin_bit16_groups[0], optimizer.round_robin_bit16_offsets[0]
    for parameter, offset in zip(ordered, offsets, strict=True):
        numel = parameter.numel()
        start, stop = (min(max(edge * part - offset, 0), numel) for edge in (rank, rank + 1))
        if start < stop:
            yield OwnedSlice(parameter, numel, start, stop, 0, offset + start - rank * part)


def all_parameters(optimizer: Any) -> list[Any]:
    """Every parameter, whole or not."""
    if is_stage_3(optimizer):
        return [parameter for group in optimizer.fp16_groups for parameter in group]
    groups = optimizer.bf16_groups if is_bf16_stage_1(optimizer) else optimizer.bit16_groups
    return list(groups[0])


def master_buffers(optimizer: Any) -> list[Tensor]:
    """The flat fp32 buffers that AdamW updates; stage 3 has one for each sub-group."""
    if is_stage_3(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    if is_bf16_stage_1(optimizer):
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def is_stage_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp16_partitioned_groups_flat")


def is_bf16_stage_1(optimizer: Any) -> bool:
    return hasattr(optimizer, "bf16_groups")
