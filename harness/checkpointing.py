"""Activation checkpointing, the same for every engine: which parts are run a second time in backward."""

import functools
from contextlib import AbstractContextManager, nullcontext

from torch.utils.checkpoint import checkpoint

from harness.activation_offload import offload_activations
from harness.config import CheckpointingConfig, RunConfig
from harness.measure.probe import Probe
from harness.model import Llama, build_model


def model_on_meta(config: RunConfig, probe: Probe) -> Llama:
    """What every engine starts from: the run's model without memory, its checkpointing applied."""
    model = build_model(config.model)
    apply_checkpointing(model, config.checkpointing, probe)
    if config.checkpointing.offload_activations:
        offload_activations(model, probe)
    return model


def apply_checkpointing(model: Llama, checkpointing: CheckpointingConfig, probe: Probe) -> None:
    """Wraps the blocks of `model.layers` in place; names of parameters stay as they are.

    full keeps the input of every block and nothing else (arXiv 1604.06174, every layer a segment).
    """
    if checkpointing.name == "none":
        return

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), probe.recompute()

    for block in model.layers.values():
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        block.forward = forward  # type: ignore[method-assign,assignment]
