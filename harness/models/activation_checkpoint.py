"""Activation checkpointing, the same for every engine: which parts of the model backward recomputes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness.config.schema import CheckpointingConfig
from harness.models.decoder import Decoder
from harness.probe import Probe
from harness.tensors.flops import multiplies_packed

_aten = torch.ops.aten

# The operators that multiply with a projection's matrix, without and with a bias, or with those of experts.
# torchtitan's policy counts mm alone, because its models have no biases.
PROJECTION_OPS = frozenset((_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default))

# The operators whose results selective checkpointing saves, all or every second one of PROJECTION_OPS. It recomputes
# everything else: norms, rotary, activation function, elementwise products, and the collectives of tensor parallelism,
# whose results are whole on every rank.
SAVED_OPS = frozenset(
    (
        *(*PROJECTION_OPS, _aten.bmm.default, _aten.baddbmm.default),
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._efficient_attention_forward.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    )
)

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def apply_checkpointing(model: Decoder, checkpointing: CheckpointingConfig, probe: Probe) -> None:
    """Wrap the decoder layers in place, or the core of their attention; parameters keep their names.

    `full` and `every_n` save nothing but a layer's input (arXiv 1604.06174); `selective` also saves the results of
    matrix products, or of every second one, and of attention; `attention` recomputes the operators between its
    projections (arXiv 2205.05198).
    """
    contexts = layer_contexts(checkpointing, probe)
    for index, block in model.layers_by_index().items():
        if checkpointing.recomputes_layer(index):
            checkpoint_block(block, contexts)
        elif checkpointing.name == "attention":
            attention: Any = block.get_submodule("self_attn")
            attention.core = checkpointed(attention.core, contexts)


def layer_contexts(checkpointing: CheckpointingConfig, probe: Probe) -> ContextFn:
    """Return the contexts of a part that is checkpointed so."""

    def selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        caching, cached = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)  # type: ignore[no-untyped-call]
        first = SavedOperatorsMode(caching, checkpointing, probe if probe.listener else None)
        return first, nested(probe.recompute(), SavedOperatorsMode(cached, checkpointing))

    return selective if checkpointing.name == "selective" else full_contexts(probe)


def checkpoint_block(block: nn.Module, contexts: ContextFn) -> None:
    """Checkpoint a layer's forward in place."""
    block.forward = checkpointed(block.forward, contexts)  # type: ignore[method-assign]


def checkpointed(forward: Callable[..., Tensor], contexts: ContextFn) -> Any:
    """Return a forward that backward runs a second time; `contexts` returns the contexts of the two runs."""
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def full_contexts(probe: Probe) -> ContextFn:
    """Return the contexts of a part of which nothing but the input is saved."""
    return lambda: (nullcontext(), probe.recompute())


class SavedOperatorsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode of one forward that passes to one of torch's only the operators whose results are saved.

    torch 2.13 counts every operator of a layer's two forwards and fails if the second one has more of a kind. Under
    DeepSpeed's stage 3 it has: which parameters are gathered ahead, and how, differs between the two. A probe is told
    what is saved, which autograd does not see.
    """

    def __init__(self, mode: Any, checkpointing: CheckpointingConfig, probe: Probe | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.checkpointing, self.probe = mode, checkpointing, probe
        self.products = 0  # so far

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.saves(func):
            return func(*args, **(kwargs or {}))
        result = self.mode.__torch_dispatch__(func, types, args, kwargs)
        if self.probe is not None:
            tree_map_only(Tensor, self.probe.saved_for_recompute, result)
        return result

    def saves(self, operator: Any) -> bool:
        """Return whether the result of the forward's next operator is saved."""
        if operator not in PROJECTION_OPS and not multiplies_packed(operator):
            return operator in SAVED_OPS
        self.products += 1
        return self.checkpointing.saves_product(self.products)


@contextmanager
def nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Return a context that enters both contexts."""
    with outer, inner:
        yield


def apply_loss_chunks(model: Decoder, chunks: int, probe: Probe) -> None:
    """Run head and loss in `chunks` parts of the tokens, each checkpointed: one part's logits live at a time."""
    head: Any = model.lm_head
    if chunks > 1 and head is not None:
        model.loss_chunks = chunks
        head.chunk_loss = checkpointed(head.chunk_loss, full_contexts(probe))
