"""Activation checkpointing, the same for every engine: which parts are run a second time in backward."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.config import CheckpointingConfig, RunConfig
from harness.measure.probe import Probe
from harness.model import Decoder, build_model


def model_on_meta(config: RunConfig, probe: Probe) -> Decoder:
    """What every engine starts from: the run's model without memory, its checkpointing applied."""
    model = build_model(config.model)
    apply_checkpointing(model, config.checkpointing, probe)
    return model


def apply_checkpointing(model: Decoder, checkpointing: CheckpointingConfig, probe: Probe) -> None:
    """Wraps the model's decoder layers in place; names of parameters stay as they are.

    full keeps the input of every block and nothing else (arXiv 1604.06174, every layer a segment).
    """
    if checkpointing.name == "none":
        return
    for block in model.blocks():
        checkpoint_block(block, probe.recompute)


def checkpoint_block(block: nn.Module, second: Callable[[], AbstractContextManager[None]]) -> None:
    """Wraps a block in place; its second forward runs inside what `second` returns."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), second()

    forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    block.forward = forward  # type: ignore[method-assign,assignment]
