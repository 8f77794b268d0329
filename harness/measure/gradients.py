"""Fingerprints of gradients that tell two trainings apart even where losses agree.

Loss alone proves little: AdamW hides the scale of gradients, so doubled gradients leave it where it was. Every
parameter's gradient is reduced to its squared norm and its product with a random vector that follows from the seed
and the parameter's name. Both are sums over elements, so what the ranks hold adds up, whatever the layout.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from harness.engines import Engine, Kind, Piece
from harness.measure.probe import Listener
from harness.weights import generator


class GradientStatistic(NamedTuple):
    """One rank's share of one parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    square: float  # sum of squares
    projection: float  # product with the parameter's random vector of unit variance


class GradientStatistics(Listener):
    """Collects the statistics when gradients are ready; holds one random vector the size of a parameter at a time.

    `aside` is entered meanwhile: that memory is not the step's.
    """

    def __init__(
        self, seed: int, device: torch.device, aside: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.seed = seed
        self.device = device
        self.aside = aside
        self.found: list[GradientStatistic] = []

    def gradients_ready(self, engine: Engine) -> None:
        with self.aside():
            self.found = statistics(engine, "gradients", self.seed, self.device)


def statistics(
    engine: Engine, kind: Kind, seed: int, device: torch.device, slot: str | None = None
) -> list[GradientStatistic]:
    """Of what this rank holds of a kind now, or of one slot of it."""
    return [statistic(piece, seed, device) for piece in engine.pieces(kind) if slot in (None, piece.slot)]


def statistic(piece: Piece, seed: int, device: torch.device) -> GradientStatistic:
    """Computed in fp64 from the piece's gradient as it is held.

    On the run's device wherever the piece lies: another's random numbers are others.
    """
    with torch.no_grad():
        whole = torch.randn(piece.shape, generator=generator(seed, f"projection/{piece.name}", device), device=device)
        direction = whole[tuple(slice(start, stop) for start, stop in piece.box)].double()
        local = piece.local.detach().to(device).double().view(direction.shape)
        square, projection = (local * local).sum(), (local * direction).sum()
    return GradientStatistic(piece.name, tuple(piece.shape), piece.box, float(square), float(projection))
