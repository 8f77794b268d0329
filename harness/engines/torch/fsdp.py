"""fully_shard (FSDP2) in its modes: NO_SHARD, SHARD_GRAD_OP and FULL_SHARD are zero_stage 0, 2 and 3."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from harness.config.schema import PrecisionConfig, RunConfig
from harness.engines.torch.mesh import hsdp_mesh
from harness.layout.layout import Layout
from harness.layout.state_widths import STATE_KINDS, StateKind
from harness.models.decoder import Decoder
from harness.models.init_weights import materialize


def apply_fully_shard(
    model: Decoder, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool, offload: OffloadPolicy
) -> None:
    """Shards embedding, every block and head as groups of their own, over the last axis of the mesh.

    reshard_after_forward is set on all of them: left to itself FSDP2 keeps the root gathered until backward, which
    is neither ZeRO-3's memory nor its volume.
    """

    def shard(part: nn.Module | Sequence[nn.Module]) -> None:
        fully_shard(
            part,  # type: ignore[arg-type]
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
        )

    for block in model.layers_by_index().values():
        shard(block)
    ends = [group for group in model.embedding_and_head_groups() if group]
    for group in ends if len(ends) > 1 else ():  # tied weights must share a group: the root's
        shard(group)
    shard(model)


def mixed_precision_policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """16-bit copies for compute of fp32 shards, and the width of gradients on the wire."""
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if precision.is_mixed else None,
        reduce_dtype=getattr(torch, precision.reduce) if precision.is_mixed else None,
    )


class HiddenFSDPModule(nn.Module):
    """A sharded part that torch's pipeline takes for any other.

    Seeing a FSDPModule it would gather once a step and reduce once a step, whatever the zero stage.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.part(*arguments, **keywords)


class FSDPParams:
    """Parts of a model whose sharded fp32 parameters are those trained; 16-bit copies exist only while gathered.

    Offloaded, shards and their gradients lie on the host, pinned, and so does what the optimizer makes of them.
    """

    def __init__(
        self, parts: Sequence[Decoder], config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device
    ) -> None:
        precision = config.precision
        policy = mixed_precision_policy(precision)
        axes = hsdp_mesh(mesh, layout)
        if axes.size(0) == 1 and layout.zero_stage > 0:
            axes = axes[axes.mesh_dim_names[1]]  # type: ignore[index]
        kept, offload = device, OffloadPolicy()
        if layout.offload == "parameters":
            kept, offload = torch.device("cpu"), CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for part in parts:
            apply_fully_shard(part, axes, policy, layout.zero_stage == 3, offload)
            materialize(part, config.model, config.train.seed, device, getattr(torch, precision.master), kept)
        self.attach(parts, layout.zero_stage)

    def attach(self, parts: Sequence[nn.Module], zero_stage: int) -> None:
        """Takes on parts that are sharded and filled, by whatever means."""
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
        """Stage 0 and copies of shards synchronise once; stages 2 and 3 reduce-scatter every micro-batch, so that
        gradients stay sharded.

        Stages 0 and 2 keep parameters gathered from the first forward to the last backward of the step.
        """
        module = self.parts[part]
        module.set_requires_all_reduce(last)
        if self.zero_stage < 3:
            module.set_reshard_after_backward(last)
        module.set_is_last_backward(last)
        yield

    def master_param(self, name: str) -> nn.Parameter:
        return self.parameters[name]

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Gradients held elsewhere than with the parameters: summed until the last micro-batch reduces them, else
        whole, of a group that is about to be reduced.
        """
        for group in (group for part in self.parts for group in fsdp_param_groups(part)):
            if group._partial_reduce_output is not None:
                yield "gradient", "summed over micro-batches", group._partial_reduce_output
            for parameter in group.fsdp_params:
                whole = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
                for gradient in (parameter.unsharded_accumulated_grad, whole):
                    if gradient is not None:
                        yield "communication", "gradients not yet reduced", gradient

    def collect_grads(self, part: int = 0) -> None:
        """Reduces what a backward for weights alone left: fully_shard hooks on the gradients of inputs."""
        for group in fsdp_param_groups(self.parts[part]):
            group.post_backward()
        state = fully_shard.state(self.parts[part])  # type: ignore[attr-defined]
        state._root_post_backward_final_callback()

    def sync_model_params(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def fsdp_param_groups(module: FSDPModule) -> Iterator[Any]:
    """The groups of parameters that are gathered together."""
    assert isinstance(module, nn.Module)
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        if group is not None:
            yield group
