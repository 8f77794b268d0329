"""The dropout masks that a step drew: how many elements they keep, and whether second forwards drew the first ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.records.evidence import DrawnMasks

# The mask among the results of an operator that draws one; the first is torch's on a CPU, the other on CUDA.
DRAWING: Mapping[str, Callable[[Any], Tensor]] = {
    "aten::bernoulli_": lambda result: result,
    "aten::native_dropout": lambda results: results[1],
}


class MaskObserver:
    """An observer of the operators of one step that draw masks. Nothing waits for a device before report()."""

    def __init__(self) -> None:
        self.elements = 0
        self.first: list[Tensor] = []  # of each mask, how many elements it keeps, and a sum that tells it from others
        self.second: list[Tensor] = []

    def observe(self, mask: Tensor, is_second: bool) -> None:
        """Note a mask of any shape, drawn in a first or in a second forward."""
        matrix = mask.reshape(-1, mask.shape[-1])
        counts = torch.cat([torch.count_nonzero(matrix, dim=dim) for dim in (0, 1)]).double()
        weights = torch.arange(len(counts), dtype=torch.float64, device=mask.device).sin()
        (self.second if is_second else self.first).append(torch.stack([counts.sum() / 2, counts @ weights]))
        self.elements += 0 if is_second else mask.numel()

    def report(self) -> DrawnMasks:
        """Return the counts."""
        first, second = ([tuple(mask.tolist()) for mask in masks] for masks in (self.first, self.second))
        nonzero = sum(int(count) for count, _ in first)
        changed = sum(mask not in first for mask in second)
        return DrawnMasks(self.elements, nonzero, len(second), changed, first[-1][1] if first else None)
