"""The AdamW optimizer that every engine trains with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness.config.schema import TrainConfig


def build_adamw(
    parameters: Sequence[nn.Parameter], train: TrainConfig, process_group: ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Return torch's AdamW over these parameters, with the run's settings.

    It is a ZeroRedundancyOptimizer if a process group is given: each rank of the group updates some whole parameters
    and broadcasts them.
    """
    settings: dict[str, Any] = {
        "lr": train.lr,
        "betas": train.betas,
        "eps": train.eps,
        "weight_decay": train.weight_decay,
        "fused": train.fused_optimizer,  # only this implementation has no temporaries as large as the model
        "foreach": not train.fused_optimizer,
    }
    if process_group is None:
        return torch.optim.AdamW(group_by_mesh(parameters), **settings)
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group, **settings)


def group_by_mesh(parameters: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Return parameter groups for an optimizer whose kernels take plain tensors or those of one mesh, never both."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]
