"""Updates that are not the optimizer's, although its settings are."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.plant import replaces


@replaces("harness.engines.torch.muon._zeropower_via_newtonschulz")
def shards_orthogonalized(ordinary: Any, update: Any, *settings: Any) -> Any:
    """Orthogonalize the part of each of two ranks as if it were the whole matrix."""
    if not isinstance(update, DTensor):
        return ordinary(update, *settings)
    whole = torch.cat([ordinary(part, *settings) for part in update.to_local().chunk(2)])
    return DTensor.from_local(whole, update.device_mesh, update.placements, run_check=False)


@replaces("torchao.optim.subclass_8bit.scale_tensor")
def without_scales(ordinary: Any, *arguments: Any) -> Any:
    """Keep the codes of moments without the scales of their blocks."""
    scaled, scales = ordinary(*arguments)
    return scaled, torch.ones_like(scales)


@replaces("torch.optim.SGD.step", of_rank=1)
def momentum_lost(ordinary: Any, optimizer: Any, *arguments: Any) -> Any:
    """Lose the momentum of rank 1 before each step."""
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    return ordinary(optimizer, *arguments)
