"""Activation checkpointing, the same for every engine: which parts are run a second time in backward."""

import functools
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from harness.activation_offload import offload_activations
from harness.compiling import apply_compile
from harness.config import CheckpointingConfig, RunConfig
from harness.measure.probe import Probe, Recompute
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
        _aten._scaled_dot_product_cudnn_attention.default,
    )
)
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def model_on_meta(config: RunConfig, probe: Probe) -> Decoder:
    """What every engine starts from: the run's model without memory; checkpointing, loss and compiler applied."""
    model = build_model(config.model)
    apply_checkpointing(model, config.checkpointing, probe)
    if config.checkpointing.offload_activations:
        offload_activations(model, probe)
    apply_loss_chunks(model, config.train.loss_chunks, probe)
    apply_compile(model, config.train.compile)
    return model


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
        results = Results(probe)
        return Keeping(results), Reusing(results, probe.recompute())

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


class Results:
    """What one pass through a layer keeps, operator by operator in the order in which they ran."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.kept: dict[Any, list[Any]] = defaultdict(list)
        self.last: Any = None

    def keep(self, operator: Any, result: Any) -> None:
        # Detached: a result itself has the graph, and the graph has this.
        self.kept[operator].append(tree_map_only(Tensor, Tensor.detach, result))
        tree_map_only(Tensor, self.probe.kept, result)
        self.last = operator

    def drop_last(self) -> None:
        """The layer's last projection: a second forward stops before it, as nothing in backward needs its result."""
        self.kept[self.last].pop()


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a layer's forward."""

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT_OPERATORS:
            self.results.keep(func, result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.results.drop_last()


class Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a second forward, or each of two where backward comes in halves; what was kept goes with the graph.

    torch's own (create_selective_checkpoint_contexts) gives each result once, which a backward in halves does not bear.
    """

    def __init__(self, results: Results, recompute: Recompute) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.recompute = recompute
        self.taken: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept, index = self.results.kept.get(func, ()), self.taken.get(func, 0)
        if index == len(kept):
            return func(*args, **(kwargs or {}))
        self.taken[func] = index + 1
        return tree_map_only(Tensor, Tensor.detach, kept[index])

    def __enter__(self) -> "Reusing":
        self.taken.clear()
        self.recompute.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.recompute.__exit__(*error)
