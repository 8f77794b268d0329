"""Tensor parallelism by DTensor, along the plan in harness.layout.layer_spec (Megatron-LM, arXiv 1909.08053).

The model works on plain tensors between the matrices: whole hidden states, or with sequence parallelism
(arXiv 2205.05198) this rank's part of the sequence, on which dropout, norms and the residual stream work.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness.config.model import ModelConfig
from harness.layout.layer_spec import SHARD_DIM, WHOLE_KEYS, WHOLE_PARAMETERS
from harness.layout.model_profile import model_profile
from harness.models.decoder import Decoder, Head
from harness.models.grouped import GroupedLinear, WidenedProduct
from harness.models.init_weights import local_box

SEQUENCE = 1  # the dimension of hidden states (batch, seq, hidden)


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard the matrices of a model on the meta device over a one-dimensional mesh, in place, under the same names.

    Attention and MLP gather their input once for all their column-parallel matrices, so that each costs one all-reduce
    in forward and one in backward, or an all-gather and a reduce-scatter.
    """
    outside: Placement = Shard(SEQUENCE) if sequence_parallel else Replicate()
    styles: dict[tuple[type[nn.Module], str], ParallelStyle] = {
        (nn.Linear, "column"): ColwiseParallel(),
        (nn.Linear, "row"): RowwiseParallel(output_layouts=outside),
        (Head, "vocabulary"): VocabularyParallelHead(input_layouts=outside, use_local_output=False),
        (nn.Embedding, "vocabulary"): VocabularyParallelEmbedding(outside),
    }
    profile = model_profile(model.config)
    for path, module in list(model.named_modules()):
        style, is_placed = profile.tensor_plan.get(path), isinstance(getattr(module, "weight", None), DTensor)
        if isinstance(module, GroupedLinear) or ".shared_experts." in path:
            continue  # see harness.engines.torch.expert_parallel and PartialExperts
        if style is not None and hasattr(module, "base_layer"):
            parallelize_module(module, mesh, AdaptedMatrix(style, outside))
        elif style is not None and not is_placed:
            kind = type(module) if isinstance(module, Head | nn.Embedding) else nn.Linear  # or torchao's class of it
            parallelize_module(module, mesh, styles[kind, style])
        elif sequence_parallel and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            parallelize_module(module, mesh, SequenceParallel(sequence_dim=SEQUENCE))
        elif sequence_parallel and path == "embed_positions":
            parallelize_module(module, mesh, SequenceParallelPositions())
    for block in model.layers.values():
        rotary = () if model.config.architecture.learned_positions else (None, None)
        attention = PrepareModuleInput(input_layouts=(outside, *rotary), desired_input_layouts=(Replicate(), *rotary))
        mlp = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
        block.self_attn.dropout_rng_rank = None if sequence_parallel else mesh.get_local_rank()  # type: ignore[union-attr,assignment]
        parallelize_module(block.get_submodule("self_attn"), mesh, attention)
        parallelize_module(block.get_submodule("mlp"), mesh, mlp)
        if model.config.architecture.has_experts:
            parallelize_module(block.get_submodule("mlp"), mesh, PartialExperts(outside))
    model.tie_weights()
    for name, parameter in model.named_parameters():  # torch's own styles make trained parameters of frozen ones
        parameter.requires_grad_(model.config.adapter.trains(name))


def apply_hf_tensor_plan(module: nn.Module, model: ModelConfig, mesh: DeviceMesh) -> None:
    """Shard a Hugging Face model along its own tensor-parallel plan, in place, each matrix by itself."""
    profile = model_profile(model)
    styles: dict[str, ParallelStyle] = {
        "column": ColwiseParallel(),
        "gathered": ColwiseParallel(output_layouts=Replicate()),
        "row": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "vocabulary": VocabularyParallelEmbedding(Replicate()),
        WHOLE_PARAMETERS: PartialGradients(),
        WHOLE_KEYS: PartialKeys(profile.rotated_key_features),
    }
    for path, part in list(module.named_modules()):
        style = profile.tensor_plan.get(path)
        if style is not None and part._parameters:
            parallelize_module(part, mesh, styles[style])
    module.tie_weights()  # type: ignore[operator]


class PartialGradients(ParallelStyle):
    """A module with whole parameters that computes for this rank's heads: gradients of the parameters are summands."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, sharded_parameter(parameter, device_mesh, Replicate()))
        module.forward = partial(with_local_parameters, module, module.forward, [Partial()])  # type: ignore[method-assign]
        return module


def with_local_parameters(
    module: nn.Module, forward: Callable[..., Tensor], gradients: Sequence[Placement] | None, *inputs: Any
) -> Tensor:
    """Return the output of a module's forward on this rank's parts of its parameters.

    Their gradients are placed as the parameters are, unless `gradients` says how.
    """
    placed = dict(module._parameters)
    for name, parameter in placed.items():
        if isinstance(parameter, DTensor):
            module._parameters[name] = parameter.to_local(grad_placements=gradients)
    try:
        return forward(*inputs)
    finally:
        module._parameters |= placed


class PartialKeys(ParallelStyle):
    """The projection of latent attention to what all heads share, which every rank has whole.

    Of its output's last features, the rotated keys, each rank's gradient is that of its heads. Those of the others are
    summed by the column-parallel matrix behind them.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sum_gradients(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            latent, keys = output.tensor_split([-self.features], dim=-1)
            placed = DTensor.from_local(keys, device_mesh, [Replicate()], run_check=False)
            return torch.cat((latent, placed.to_local(grad_placements=[Partial()])), dim=-1)

        module.register_forward_hook(sum_gradients)
        return module


class PartialExperts(ParallelStyle):
    """A mixture of experts over whole hidden states, in which each rank has a part of every expert.

    What a rank computes of the output, and of the gradients of the input and of the router's weight, are summands.
    """

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self.outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        router = module.get_submodule("gate")
        router.weight = sharded_parameter(router.weight, device_mesh, Replicate())  # type: ignore[arg-type]
        router.forward = partial(route_partial, router)  # type: ignore[method-assign]
        for name, shared in module.named_modules():
            if isinstance(shared, nn.Linear) and name.startswith("shared_experts."):
                cut = Shard(1 if name.endswith("down_proj") else 0)
                shared.weight = sharded_parameter(shared.weight, device_mesh, cut)  # type: ignore[arg-type]
                shared.forward = partial(with_local_parameters, shared, shared.forward, None)  # type: ignore[method-assign]
        module.forward = partial(mix_partial, module.forward, device_mesh, self.outside)  # type: ignore[method-assign]
        return module


class AdaptedMatrix(ParallelStyle):
    """A matrix with its adapter, of which each rank computes its outputs, or a summand of them by its inputs.

    One matrix of the adapter is whole on every rank, and its gradient is a summand: nothing is sent but those of the
    layer without adapters.
    """

    def __init__(self, style: str, outside: Placement) -> None:
        super().__init__()
        self.style, self.outside = style, outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = {"column": "lora_A", "row": "lora_B"}[self.style]
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear):
                is_whole = name.startswith(whole)
                placement = Replicate() if is_whole else Shard(SHARD_DIM[self.style])
                part.weight = sharded_parameter(part.weight, device_mesh, placement)  # type: ignore[arg-type]
                gradients = [Partial()] if is_whole else None
                part.forward = partial(with_local_parameters, part, part.forward, gradients)  # type: ignore[method-assign]
        outside = self.outside if self.style == "row" else None
        module.forward = partial(multiply_adapted, module.forward, device_mesh, outside)  # type: ignore[method-assign]
        return module


def multiply_adapted(
    forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, outside: Placement | None, hidden: Tensor
) -> Tensor:
    """Return this rank's outputs of a matrix with its adapter, or its part of the sum of all ranks' summands."""
    output = forward(hidden.to_local(grad_placements=[Partial()]) if isinstance(hidden, DTensor) else hidden)
    if outside is None:
        return output
    return DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[outside]).to_local()


def sharded_parameter(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a parameter on the meta device as one that is placed on a mesh."""
    return nn.Parameter(distribute_tensor(parameter, mesh, [placement]))


def route_partial(router: nn.Module, tokens: Tensor) -> Tensor:
    """Return a router's logits (tokens, experts); the gradient of its weight is a summand."""
    weight = router.weight
    assert isinstance(weight, DTensor)
    return WidenedProduct.apply(tokens, weight.to_local(grad_placements=[Partial()]))  # type: ignore[no-any-return,no-untyped-call]


def mix_partial(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, outside: Placement, hidden: DTensor) -> Tensor:
    """Return this rank's part of the sum of all ranks' outputs of a mixture of experts over whole hidden states."""
    output = forward(hidden.to_local(grad_placements=[Partial()]))
    summand = DTensor.from_local(output, mesh, [Partial()], run_check=False)
    return summand.redistribute(placements=[outside]).to_local()


class VocabularyParallelHead(ColwiseParallel):
    """A head that is sharded along the vocabulary; a loss computed inside the module passes through unchanged."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if not isinstance(outputs, DTensor):
            return outputs
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)  # type: ignore[no-untyped-call]


class VocabularyParallelEmbedding(RowwiseParallel):
    """An embedding that is sharded by rows: each rank looks up the tokens it holds, and the ranks sum.

    torch's own RowwiseParallel does this too, but allocates the gradient of the whole embedding on every rank.
    """

    def __init__(self, output: Placement) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._partition_embedding_fn("", module, device_mesh)  # type: ignore[no-untyped-call]
        (first, end), _ = local_box(module.weight)  # type: ignore[arg-type]
        padding = module.padding_idx  # its row has no gradient
        module.padding_idx = padding - first if padding is not None and first <= padding < end else None  # type: ignore[operator,assignment]
        lookup = partial(with_local_parameters, module, module.forward, None)
        module.forward = partial(vocab_parallel_lookup, module, lookup, device_mesh, self.output_layouts)  # type: ignore[method-assign]
        return module


def vocab_parallel_lookup(
    module: nn.Module,
    lookup: Callable[[Tensor], Tensor],
    mesh: DeviceMesh,
    output: Sequence[Placement],
    tokens: Tensor,
) -> Tensor:
    """Return this rank's part of the hidden states (batch, seq, hidden) of token ids (batch, seq).

    The token ids are the same on every rank. `lookup` is the embedding's own, which may scale the rows.
    """
    weight = module.weight
    assert isinstance(weight, DTensor)
    (first, end), _ = local_box(weight)
    is_foreign = (tokens < first) | (tokens >= end)
    rows = lookup((tokens - first).masked_fill(is_foreign, 0))
    partial_sum = DTensor.from_local(
        rows.masked_fill(is_foreign.unsqueeze(-1), 0.0), mesh, [Partial()], run_check=False
    )
    return partial_sum.redistribute(placements=output).to_local()


class SequenceParallelPositions(ParallelStyle):
    """A table of learned positions, replicated; each rank looks up its part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = sharded_parameter(module.weight, device_mesh, Replicate())  # type: ignore[arg-type]
        module.forward = partial(lookup_partial, module, device_mesh)  # type: ignore[method-assign]
        return module


def lookup_partial(module: nn.Module, mesh: DeviceMesh, positions: Tensor) -> Tensor:
    """Return this rank's part of the embeddings (seq, hidden) of positions (seq,); the gradient is a partial sum."""
    weight = module.weight
    assert isinstance(weight, DTensor)
    own = positions.chunk(mesh.size())[mesh.get_local_rank()]
    return F.embedding(own, weight.to_local(grad_placements=[Partial()]))
