"""fully_shard (FSDP2) in its modes: NO_SHARD, SHARD_GRAD_OP and FULL_SHARD are zero_stage 0, 2 and 3."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from harness.config import RunConfig
from harness.engines import KINDS, Kind
from harness.layout import Layout
from harness.model import Llama, materialise


def apply_fully_shard(
    model: Llama, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool, offload: OffloadPolicy
) -> None:
    """Shards embedding, every block and head as groups of their own, over the last axis of the mesh.

    reshard_after_forward is set on all of them: left to itself FSDP2 keeps the root gathered until backward, which
    is neither ZeRO-3's memory nor its volume.
    """

    def shard(part: nn.Module | list[nn.Module]) -> None:
        fully_shard(  # type: ignore[call-overload]
            part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, offload_policy=offload
        )

    for block in model.layers.values():
        shard(block)
    if not model.config.tie_word_embeddings:  # tied weights must share a group: the root's
        for group in ([model.embed_tokens], [model.norm, model.lm_head]):
            shard([part for part in group if part is not None])
    shard(model)


class FullyShard:
    """A model whose sharded fp32 parameters are the ones trained; 16-bit copies exist only while gathered.

    Offloaded, shards and their gradients lie on the host, pinned, and so does what the optimizer makes of them.
    """

    def __init__(self, model: Llama, config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> None:
        precision = config.precision
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, precision.compute) if precision.mixed else None,
            reduce_dtype=getattr(torch, precision.reduce) if precision.mixed else None,
        )
        axes = mesh["dp_shard"] if layout.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"]
        kept, offload = device, OffloadPolicy()
        if layout.offload == "parameters":
            kept, offload = torch.device("cpu"), CPUOffloadPolicy(pin_memory=device.type == "cuda")
        apply_fully_shard(model, axes, policy, layout.zero_stage == 3, offload)
        materialise(model, config.model, config.train.seed, device, getattr(torch, precision.master), kept)
        assert isinstance(model, FSDPModule)
        self.module: nn.Module = model
        self.fsdp: FSDPModule = model
        self.zero_stage = layout.zero_stage
        self.names = dict(model.named_parameters())
        self.on_host: tuple[Kind, ...] = KINDS if all(self.offloaded_groups()) else ()

    def offloaded_groups(self) -> Iterator[bool]:
        """Of every parameter, as fully_shard holds it, whether it and its gradient are kept on the host."""
        for part in self.module.modules():
            group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
            yield from () if group is None else (parameter.offload_to_cpu for parameter in group.fsdp_params)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Stage 0 synchronises once; stages 2 and 3 reduce-scatter every micro-batch, so gradients stay sharded.

        Stage 2 keeps parameters gathered from the first forward to the last backward of the step.
        """
        if self.zero_stage == 0:
            self.fsdp.set_requires_all_reduce(last)
        if self.zero_stage == 2:
            self.fsdp.set_reshard_after_backward(last)
        self.fsdp.set_is_last_backward(last)
        yield

    def trained(self, name: str) -> nn.Parameter:
        return self.names[name]

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Gradients held elsewhere than with the parameters: in stage 0 summed until the last micro-batch reduces them,
        else whole, of a group that is about to be reduced.
        """
        for part in self.module.modules():
            group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
            if group is None:
                continue
            if group._partial_reduce_output is not None:
                yield "gradient", "summed over micro-batches", group._partial_reduce_output
            for parameter in group.fsdp_params:
                whole = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
                for gradient in (parameter.unsharded_accumulated_grad, whole):
                    if gradient is not None:
                        yield "communication", "gradients not yet reduced", gradient

    def collect(self) -> None:
        pass

    def publish(self) -> None:
        pass
