"""Activation checkpointing, the same for every engine: which parts are run a second time in backward."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness.activation_offload import offload_activations
from harness.compiling import apply_compile
from harness.config import CheckpointingConfig, RunConfig
from harness.measure.probe import Probe
from harness.model import Decoder, build_model

_aten = torch.ops.aten
# What a selective second forward takes from the first. Everything else it runs again: norms, rotary, activation
# function, products, and the collectives of tensor parallelism, whose results are whole on every rank.
KEPT_OPERATORS = frozenset(
    (
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._efficient_attention_forward.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    )
)
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def model_on_meta(config: RunConfig, probe: Probe) -> Decoder:
    """What every engine starts from: the run's model without memory; checkpointing, loss and compiler applied."""
    model = build_model(config.model)
    apply_step_options(model, config, probe)
    return model


def apply_step_options(model: Decoder, config: RunConfig, probe: Probe) -> None:
    """Compiler, checkpointing, offload of what is kept then, and the loss in parts: each around those before it."""
    apply_compile(model, config.train.compile)
    apply_checkpointing(model, config.checkpointing, probe)
    if config.checkpointing.offload_activations:
        offload_activations(model, probe)
    apply_loss_chunks(model, config.train.loss_chunks, probe)


def apply_loss_chunks(model: Decoder, chunks: int, probe: Probe) -> None:
    """Has head and loss run in so many parts of the tokens, each checkpointed: one part's logits live at a time."""
    head: Any = model.lm_head if chunks > 1 else None
    if head is None:
        return

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), probe.recompute()

    model.loss_chunks = chunks
    head.part = functools.partial(checkpoint, head.part, use_reentrant=False, context_fn=contexts)


def apply_checkpointing(model: Decoder, checkpointing: CheckpointingConfig, probe: Probe) -> None:
    """Wraps the blocks of `model.layers` in place, or the core of their attention; names of parameters stay.

    A layer run again whole keeps its input and nothing else (arXiv 1604.06174); selective keeps the results of matrix
    products and of attention too; attention runs again what lies between its projections (arXiv 2205.05198).
    """

    def whole() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), probe.recompute()

    def selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = create_selective_checkpoint_contexts(is_kept)  # type: ignore[no-untyped-call]
        return both(first, Kept(probe)) if probe.listener else first, both(probe.recompute(), second)

    for index, block in model.blocks().items():
        if checkpointing.calls_again(index):
            checkpoint_block(block, selective if checkpointing.name == "selective" else whole)
        elif checkpointing.name == "attention":
            attention: Any = block.get_submodule("self_attn")
            attention.core = again(attention.core, whole)


def checkpoint_block(block: nn.Module, contexts: Contexts) -> None:
    """Wraps a layer's forward in place."""
    block.forward = again(block.forward, contexts)  # type: ignore[method-assign]


def again(forward: Callable[..., Tensor], contexts: Contexts) -> Any:
    """A function whose results' inputs are made again in backward; torch asks for contexts of the first and second."""
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def is_kept(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells whoever listens what a selectively checkpointed forward keeps, past autograd."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT_OPERATORS:
            tree_map_only(Tensor, self.probe.kept, result)
        return result


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
