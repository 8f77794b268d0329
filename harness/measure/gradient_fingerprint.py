"""Fingerprints of gradients that tell two trainings apart even where losses agree.

The loss alone proves little: AdamW hides the scale of gradients, so that doubled gradients do not change it. Every
parameter's gradient is reduced to its squared norm and its dot product with a random vector that follows from the seed
and the parameter's name. Both are sums over elements, so the ranks' shards add up to the whole in any layout.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from harness.layout.state_widths import StateKind
from harness.models.init_weights import generator
from harness.probe import Listener, ShardSource
from harness.records.tensor_shards import TensorFingerprint
from harness.tensors.shard import Shard


class GradientFingerprints(Listener):
    """A listener that takes fingerprints when gradients are ready.

    It needs one random vector of the size of a parameter at a time. `uncounted` is entered meanwhile, because that
    memory is not the step's.
    """

    def __init__(
        self, seed: int, device: torch.device, uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.seed = seed
        self.device = device
        self.uncounted = uncounted
        self.fingerprints: list[TensorFingerprint] = []

    def gradients_ready(self, engine: ShardSource) -> None:
        """Take the fingerprints of this rank's gradients."""
        with self.uncounted():
            self.fingerprints = tensor_fingerprints(engine, "gradients", self.seed, self.device)


def tensor_fingerprints(
    engine: ShardSource, kind: StateKind, seed: int, device: torch.device, slot: str | None = None
) -> list[TensorFingerprint]:
    """Return the fingerprints of this rank's present shards of one kind of state, or only of the optimizer's `slot`."""
    return [
        tensor_fingerprint(shard, seed, device)
        for shard in engine.local_shards(kind)
        if slot in (None, shard.state_name)
    ]


def tensor_fingerprint(shard: Shard, seed: int, device: torch.device) -> TensorFingerprint:
    """Return the fingerprint of one shard, computed in fp64 from the values as they are stored.

    It is computed on the run's device wherever the shard lies, because another device draws other random numbers.
    """
    with torch.no_grad():
        whole = torch.randn(shard.shape, generator=generator(seed, f"projection/{shard.name}", device), device=device)
        direction = whole[tuple(slice(start, stop) for start, stop in shard.box)].double()
        local = shard.local.detach().to(device).double().view(direction.shape)
        square, projection = (local * local).sum(), (local * direction).sum()
    return TensorFingerprint(shard.name, tuple(shard.shape), shard.box, float(square), float(projection))
