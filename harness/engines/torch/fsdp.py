"""Sharded parameters by fully_shard (FSDP2): NO_SHARD, SHARD_GRAD_OP and FULL_SHARD are zero_stage 0, 2 and 3."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from harness.config.schema import PrecisionConfig, RunConfig
from harness.engines.torch.mesh import hsdp_mesh
from harness.layout.layout import Layout
from harness.layout.partition import fsdp_dim
from harness.layout.state_widths import STATE_KINDS, StateKind
from harness.models.decoder import Decoder
from harness.models.init_weights import materialize


def apply_fully_shard(
    model: Decoder,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int,
    offload: OffloadPolicy,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard embedding, every block and head as groups of their own over the last axis of the mesh, in place.

    reshard_after_forward is set on all of them: by default FSDP2 keeps the root gathered until backward, which matches
    neither the memory nor the communication volume of ZeRO-3. Experts that expert parallelism divides are groups of
    their own, over the ranks that have the same ones.
    """

    def shard(part: nn.Module | Sequence[nn.Module], mesh: DeviceMesh = mesh) -> None:
        def placement(parameter: nn.Parameter) -> Shard:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            return Shard(fsdp_dim(local.shape, mesh.size(-1)))

        fully_shard(
            part,  # type: ignore[arg-type]
            mesh=mesh,
            shard_placement_fn=placement,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
        )

    blocks = list(model.layers_by_index().values())
    for block in blocks:
        if expert_mesh is not None:
            experts = block.get_submodule("mlp.experts")
            shard(experts, expert_mesh)
            average_over(experts, mesh.size(), is_sharded=expert_mesh.size(-1) > 1)
        shard(block)
    ends = [group for group in model.embedding_and_head_groups() if group]
    for group in ends if len(ends) > 1 else ():  # tied weights must share a group: the root's
        shard(group)
    shard(model)
    has_backward = len(ends) > 1 and any(parameter.requires_grad for parameter in ends[0][0].parameters())
    end_backward_prefetch(ends[0][0] if has_backward else blocks[0])  # frozen tables have no backward


def average_over(experts: nn.Module, ranks: int, is_sharded: bool) -> None:
    """Divide the gradients of experts by all data-parallel ranks, whose tokens are summed in them.

    Those that have the same experts, which reduce them, are fewer. torch then divides by a reduction that gloo does not
    have, or by an operator if it is to sum. Where a single rank has a shard it always divides, and to sum would divide
    once more (_fsdp_collectives.py, foreach_reduce).
    """
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(ranks)
    experts.set_force_sum_reduction_for_comms(is_sharded)


def end_backward_prefetch(first: nn.Module) -> None:
    """Let the first group in the order of forward prefetch nothing in backward.

    Each group prefetches the one that ran before it in forward. Before the first one ran the last group of the
    micro-batch before, which torch forgets only in the last backward: that group would be gathered once more than it is
    used in every step that accumulates. The first group is gathered already when it prefetches itself.
    """
    assert isinstance(first, FSDPModule)
    first.set_modules_to_backward_prefetch([first])


def mixed_precision_policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: 16-bit copies of fp32 shards for compute, and the width in which gradients are reduced."""
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if precision.is_mixed else None,
        reduce_dtype=getattr(torch, precision.reduce) if precision.is_mixed else None,
    )


def shard_parts(
    parts: Sequence[Decoder], config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device
) -> None:
    """Shard parts on the meta device as the layout says, in place, and fill the shards with their initial values."""
    policy = mixed_precision_policy(config.precision)
    axes, expert_axes = hsdp_mesh(mesh, layout), hsdp_mesh(mesh, layout.of_experts) if layout.ep_enabled else None
    storage_device, offload = device, OffloadPolicy()
    if layout.offload == "parameters":
        storage_device, offload = torch.device("cpu"), CPUOffloadPolicy(pin_memory=device.type == "cuda")
    compute, master = getattr(torch, config.precision.compute), getattr(torch, config.precision.master)
    for part in parts:
        apply_fully_shard(part, axes, policy, layout.reshard_after_forward, offload, expert_axes)
        materialize(part, config.model, config.train.seed, device, compute, storage_device, master)


class HiddenFSDPModule(nn.Module):
    """A wrapper that hides from torch's pipeline that a part is sharded.

    The pipeline would gather an FSDPModule once a step and reduce it once a step, whatever the zero stage.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the sharded part."""
        return self.part(*arguments, **keywords)


class FSDPParams:
    """Sharded parts of a model: the optimizer updates the fp32 shards, and 16-bit copies exist only while gathered.

    The shards, their gradients and the optimizer's state lie in the host's pinned memory under offload.
    """

    def __init__(self, parts: Sequence[nn.Module], zero_stage: int) -> None:
        """Take over parts that are already sharded and materialized."""
        self.parts: list[FSDPModule] = []
        for part in parts:
            assert isinstance(part, FSDPModule)
            self.parts.append(part)
        self.modules: list[nn.Module] = [HiddenFSDPModule(part) for part in parts]
        self.zero_stage = zero_stage
        self.parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        groups = [group for part in self.parts for group in fsdp_param_groups(part)]
        offloaded = all(parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params)
        self.host_state: tuple[StateKind, ...] = STATE_KINDS if offloaded else ()

    @contextmanager
    def sync_context(self, last: bool, part: int = 0) -> Iterator[None]:
        """Return a context that reduces gradients as the zero stage requires.

        Stage 0 and replicas of shards all-reduce once a step; stages 2 and 3 reduce-scatter every micro-batch, so that
        gradients stay sharded. Stages 0 and 2 keep parameters gathered from the first forward to the last backward of
        the step.
        """
        module = self.parts[part]
        module.set_requires_all_reduce(last)
        if self.zero_stage < 3:
            module.set_reshard_after_backward(last)
        module.set_is_last_backward(last)
        yield

    def master_param(self, name: str) -> nn.Parameter:
        """Return the fp32 shard itself."""
        return self.parameters[name]

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the gradients that are not stored in the parameters' own `grad`.

        They are partial sums that the last micro-batch all-reduces, or unsharded gradients of a group that is about to
        be reduced.
        """
        for group in (group for part in self.parts for group in fsdp_param_groups(part)):
            if group._partial_reduce_output is not None:
                yield "gradient", "summed over micro-batches", group._partial_reduce_output
            for parameter in group.fsdp_params:
                unsharded_grad = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
                for gradient in (parameter.unsharded_accumulated_grad, unsharded_grad):
                    if gradient is not None:
                        yield "communication", "gradients not yet reduced", gradient

    def collect_grads(self, part: int = 0) -> None:
        """Reduce the gradients of a backward for weights alone, in which fully_shard's hooks on inputs do not run."""
        for group in fsdp_param_groups(self.parts[part]):
            group.post_backward()
        state = fully_shard.state(self.parts[part])  # type: ignore[attr-defined]
        state._root_post_backward_final_callback()

    def reduce_experts(self) -> None:
        """Do nothing: fully_shard has averaged the gradients of experts as those of other groups."""

    def sync_model_params(self) -> None:
        """Free the gradients. Nothing is copied, because the optimizer updates the shards themselves."""
        for parameter in self.parameters.values():
            parameter.grad = None


def fsdp_param_groups(module: FSDPModule) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters that are gathered together."""
    assert isinstance(module, nn.Module)
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        if group is not None:
            yield group
