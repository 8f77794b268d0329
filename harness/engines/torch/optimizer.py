"""The optimizer that every engine trains with, built as its OptimizerSpec says."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness.config.schema import RunConfig


def build_optimizer(
    parameters: Sequence[nn.Parameter], config: RunConfig, process_group: ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Return the run's optimizer over these parameters, with its settings.

    It is a ZeroRedundancyOptimizer if a process group is given: each rank of the group updates some whole parameters
    and broadcasts them.
    """
    train, build = config.train, getattr(torch.optim, config.optimizer.name)
    settings: dict[str, Any] = {key: getattr(train, key) for key in config.optimizer.settings}
    # Only the fused implementation has no temporaries as large as the model.
    settings |= {"fused": train.fused_optimizer, "foreach": not train.fused_optimizer}
    if process_group is None:
        optimizer: torch.optim.Optimizer = build(group_by_mesh(parameters), **settings)
        return optimizer
    return ZeroRedundancyOptimizer(parameters, build, process_group, **settings)


def group_by_mesh(parameters: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Return parameter groups for an optimizer whose kernels take plain tensors or those of one mesh, never both."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]
