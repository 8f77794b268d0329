"""Fingerprints of gradients that tell two trainings apart even where losses agree.

Loss alone proves little: AdamW hides the scale of gradients, so doubled gradients leave it where it was. Every
parameter's gradient is reduced to its squared norm and its product with a random vector that follows from the seed
and the parameter's name. Both are sums over elements, so what the ranks hold adds up, whatever the layout.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from harness.layout.state_widths import StateKind
from harness.models.init_weights import generator
from harness.probe import Listener, ShardSource
from harness.records.schema import TensorFingerprint
from harness.tensors.shard import Shard


class GradientFingerprints(Listener):
    """Collects the statistics when gradients are ready; holds one random vector the size of a parameter at a time.

    `aside` is entered meanwhile: that memory is not the step's.
    """

    def __init__(
        self, seed: int, device: torch.device, aside: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.seed = seed
        self.device = device
        self.aside = aside
        self.found: list[TensorFingerprint] = []

    def gradients_ready(self, engine: ShardSource) -> None:
        with self.aside():
            self.found = tensor_fingerprints(engine, "gradients", self.seed, self.device)


def tensor_fingerprints(
    engine: ShardSource, kind: StateKind, seed: int, device: torch.device, slot: str | None = None
) -> list[TensorFingerprint]:
    """Of what this rank holds of a kind now, or of one slot of it."""
    return [
        tensor_fingerprint(piece, seed, device)
        for piece in engine.local_shards(kind)
        if slot in (None, piece.state_name)
    ]


def tensor_fingerprint(piece: Shard, seed: int, device: torch.device) -> TensorFingerprint:
    """Computed in fp64 from the piece's gradient as it is held.

    On the run's device wherever the piece lies: another's random numbers are others.
    """
    with torch.no_grad():
        whole = torch.randn(piece.shape, generator=generator(seed, f"projection/{piece.name}", device), device=device)
        direction = whole[tuple(slice(start, stop) for start, stop in piece.box)].double()
        local = piece.local.detach().to(device).double().view(direction.shape)
        square, projection = (local * local).sum(), (local * direction).sum()
    return TensorFingerprint(piece.name, tuple(piece.shape), piece.box, float(square), float(projection))
