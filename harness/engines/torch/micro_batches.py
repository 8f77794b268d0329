"""Forward and backward of a step's micro-batches, one after another where every rank holds all layers."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from harness.engines.base import Batch
from harness.engines.torch.data_parallel import DataParallel
from harness.engines.torch.loss_scaler import LossScaler
from harness.models.decoder import loss_of
from harness.probe import Probe


class MicroBatchRunner(Protocol):
    """A callable that runs forward and backward of all micro-batches of a step.

    It leaves each gradient on the tensor that the optimizer updates (DataParallel.master_param).
    """

    def __call__(self, micro_batches: Sequence[Batch]) -> "Tensor | None":
        """Return the mean loss over this rank's tokens, detached, or None where another stage computes it."""


class GradAccumulationLoop:
    """A MicroBatchRunner that accumulates gradients: each micro-batch's forward, then its backward."""

    def __init__(
        self,
        parallel: DataParallel,
        probe: Probe,
        loss_scaler: LossScaler,
        loss_chunks: int,
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> None:
        """Accumulate gradients by a library's own backward of a scaled loss, if it is not torch's."""
        self.parallel = parallel
        self.backward = backward
        self.loss_chunks = loss_chunks
        self.probe = probe
        self.loss_scaler = loss_scaler

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Return the mean loss over this rank's tokens, detached, once all gradients are accumulated."""
        count = len(micro_batches)
        losses = []
        for index, batch in enumerate(micro_batches):
            with self.parallel.sync_context(last=index == count - 1):
                with self.probe.phase("forward"):
                    loss = loss_of(self.parallel.modules[0], batch.inputs, batch.targets, self.loss_chunks)
                losses.append(loss.detach())
                with self.probe.phase("backward"):
                    self.backward(loss * (self.loss_scaler.factor / count))
                    del loss  # frees what is left of the graph
        return torch.stack(losses).mean()
