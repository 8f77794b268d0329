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

from harness.config.optimizer import OptimizerSpec, UpdateRule
from harness.config.schema import TrainConfig
from harness.records.evidence import UpdateReport
from harness.tensors.storage import plain_tensors

# The relative errors of fp32: of a parameter, which is stored twice, and of its change, after some ten operations.
STORED, COMPUTED = 2.0**-23, 2.0**-20
CODED = 100  # times eps, from which on the code of a moment tells the change: codes may be off by two thirds
SMALLEST = torch.finfo(torch.float32).tiny


class Updates:
    """The optimizers that really step, whatever wraps them, and what they have updated so far."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.rules = {rule.name: rule for rule in spec.rules}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.steps: Counter[int] = Counter()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Return a context of a step, whose optimizers of the run's classes are known from then on."""
        handle = register_optimizer_step_post_hook(self._remember)
        try:
            yield
        finally:
            handle.remove()

    def _remember(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer).__name__ in self.rules and id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self._count(optimizer)
            optimizer.register_step_post_hook(self._count)  # for later steps

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps[id(optimizer)] += 1

    def report(self) -> UpdateReport:
        """Return the settings of all groups of parameters, and how many elements were updated how often.

        Some optimizers count the updates of each parameter, and others none.
        """
        settings: dict[tuple[tuple[str, Any], ...], None] = {}
        elements: Counter[int] = Counter()
        for identity, optimizer in self.optimizers.items():
            keys = self.rules[type(optimizer).__name__].settings
            for group in optimizer.param_groups:
                values = (group[key].item() if isinstance(group[key], Tensor) else group[key] for key in keys)
                settings[tuple(zip(keys, values, strict=True))] = None
            for parameter, state in optimizer.state.items():
                steps = int(state.get("step", self.steps[identity]))
                elements[steps] += sum(local.numel() for local in plain_tensors(parameter))
        return UpdateReport(tuple(settings), tuple(elements.items()))


def adamw_change(initial: Tensor, moment: Tensor, train: TrainConfig) -> Tensor:
    """Return AdamW's first change, by arXiv 1711.05101 with the corrections of both biases.

    The first moment is (1 - beta1) g of the clipped gradient g, and the change -lr (g / (|g| + eps) + weight_decay x
    initial). The moment is overwritten.
    """
    gradient = moment.div_(1 - train.betas[0])
    return gradient.div_(gradient.abs().add_(train.eps)).add_(initial, alpha=train.weight_decay).mul_(-train.lr)


def sgd_change(initial: Tensor, moment: Tensor, train: TrainConfig) -> Tensor:
    """Return SGD's first change, -lr times its momentum, which is the clipped gradient with the weight decay."""
    return moment.mul(-train.lr)


CHANGES = {"adamw": adamw_change, "sgd": sgd_change}


def first_update_excess(
    initial: Tensor, updated: Tensor, moment: Tensor, rule: UpdateRule, train: TrainConfig, chunk: int
) -> float:
    """Return how far a shard's first update is from its rule, relative to half of its weight decay and to rounding.

    All tensors are of fp32, and `chunk` elements of each are on the initial values' device at a time. The code of
    a moment that is not far above eps does not tell the change, and is left out.
    """
    assert rule.formula is not None
    squares = torch.zeros(4, dtype=torch.float64, device=initial.device)
    flat = [torch.split(tensor.detach().reshape(-1), chunk) for tensor in (initial, updated, moment)]
    for start, end, first_moment in zip(*flat, strict=True):
        end, own = end.to(start.device), first_moment.to(start.device, torch.float32, copy=True)
        is_known = own.abs() > CODED * train.eps if rule.states[rule.gradient_state].block > 1 else True
        change = CHANGES[rule.formula](start, own, train)
        residual = (end - start - change) * is_known
        squares += torch.stack([part.norm().double() ** 2 for part in (start, end, change, residual)])
    size, end_size, change_size, residual = squares.sqrt().tolist()
    rounding = STORED * (size + end_size) + COMPUTED * change_size
    excess: float = residual / max(train.lr * train.weight_decay * size / 2 + rounding, SMALLEST)
    return excess
