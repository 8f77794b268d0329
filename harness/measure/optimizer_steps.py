"""What really updates parameters: the settings with which torch's optimizer steps, and whether its update is theirs.

Noise floors of 16-bit training hide both: a layout that trains without weight decay, or with another rate for some
parameters, deviates less in its first steps than rounding does.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.config.schema import OptimizerSpec, TrainConfig
from harness.records.evidence import UpdateReport
from harness.tensors.storage import plain_tensors

# The relative errors of fp32: of a parameter, which is stored twice, and of its change, after some ten operations.
STORED, COMPUTED = 2.0**-23, 2.0**-20
SMALLEST = torch.finfo(torch.float32).tiny


class Updates:
    """The optimizers that really step, whatever wraps them, and what they have updated so far."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.optimizers: dict[int, torch.optim.Optimizer] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Return a context of a step, whose optimizers of the run's class are known from then on."""
        handle = register_optimizer_step_post_hook(self._remember)
        try:
            yield
        finally:
            handle.remove()

    def _remember(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer).__name__ == self.spec.name:
            self.optimizers[id(optimizer)] = optimizer

    def report(self) -> UpdateReport:
        """Return the settings of all groups of parameters, and how many elements were updated how often."""
        groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        elements: Counter[int] = Counter()
        for optimizer in self.optimizers.values():
            for parameter, state in optimizer.state.items():
                elements[int(state["step"])] += sum(local.numel() for local in plain_tensors(parameter))
        settings = dict.fromkeys(tuple(group[key] for key in self.spec.settings) for group in groups)
        return UpdateReport(tuple(settings), tuple(elements.items()))


def first_update_excess(initial: Tensor, updated: Tensor, moment: Tensor, train: TrainConfig, chunk: int) -> float:
    """Return how far a shard's first update is from AdamW's, relative to half of its weight decay and to rounding.

    AdamW's first moment is (1 - beta1) g of the clipped gradient g, and its first update, by arXiv 1711.05101 with the
    corrections of both biases, -lr (g / (|g| + eps) + weight_decay x initial). All tensors are of fp32, and `chunk`
    elements of each are on the initial values' device at a time.
    """
    squares = torch.zeros(4, dtype=torch.float64, device=initial.device)
    flat = [torch.split(tensor.detach().reshape(-1), chunk) for tensor in (initial, updated, moment)]
    for start, end, first_moment in zip(*flat, strict=True):
        end, gradient = end.to(start.device), first_moment.to(start.device) / (1 - train.betas[0])
        change = gradient.div_(gradient.abs().add_(train.eps)).add_(start, alpha=train.weight_decay).mul_(-train.lr)
        squares += torch.stack([part.norm().double() ** 2 for part in (start, end, change, end - start - change)])
    size, end_size, change_size, residual = squares.sqrt().tolist()
    rounding = STORED * (size + end_size) + COMPUTED * change_size
    excess: float = residual / max(train.lr * train.weight_decay * size / 2 + rounding, SMALLEST)
    return excess
