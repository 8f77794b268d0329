"""Forward and backward of a step's micro-batches where every rank holds the whole depth: one after another."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from harness.engines.base import Batch
from harness.engines.torch.data_parallel import DataParallel
from harness.engines.torch.loss_scaler import LossScaler
from harness.models.loss import loss_of
from harness.probe import Probe


class MicroBatchRunner(Protocol):
    """Forward and backward of all micro-batches of a step; gradients are left with the parameters' trained forms."""

    def __call__(self, micro_batches: Sequence[Batch]) -> "Tensor | None":
        """The mean loss over this rank's tokens, detached; None where another stage computes it."""
        ...


class GradAccumulationLoop:
    """Each micro-batch's forward, then its backward."""

    def __init__(self, parallel: DataParallel, probe: Probe, scale: LossScaler, loss_chunks: int) -> None:
        self.parallel = parallel
        self.loss_chunks = loss_chunks
        self.probe = probe
        self.scale = scale

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor:
        count = len(micro_batches)
        losses = []
        for index, batch in enumerate(micro_batches):
            with self.parallel.sync_context(last=index == count - 1):
                with self.probe.phase("forward"):
                    loss = loss_of(self.parallel.modules[0], batch.inputs, batch.targets, self.loss_chunks)
                losses.append(loss.detach())
                with self.probe.phase("backward"):
                    self.backward(loss * (self.scale.factor / count))
                    del loss  # and with it what is left of the graph
        return torch.stack(losses).mean()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
