"""The optimizers that every engine trains with, built as the run's OptimizerSpec says."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness.config.schema import RunConfig
from harness.layout.model_profile import model_profile
from harness.layout.partition import is_layer_matrix


def build_optimizers(
    parameters: Mapping[str, nn.Parameter], config: RunConfig, process_group: ProcessGroup | None = None
) -> list[torch.optim.Optimizer]:
    """Return the run's optimizers over these parameters by name, one for each rule that has any, with their settings.

    They are a ZeroRedundancyOptimizer if a process group is given: each rank of the group updates some whole parameters
    and broadcasts them.
    """
    spec, layer_of = config.optimizer.spec, model_profile(config.model).layer_index
    optimizers: list[torch.optim.Optimizer] = []
    for rule in spec.rules:
        own = [
            parameter
            for name, parameter in parameters.items()
            if spec.rule_of(is_layer_matrix(layer_of(name), parameter.shape)) is rule
        ]
        build = getattr(importlib.import_module(rule.module), rule.name)
        settings: dict[str, Any] = {key: config.optimizer_setting(key) for key in rule.settings} | {**rule.arguments}
        if rule.kernels:  # only the fused implementation has no temporaries as large as the model
            settings |= {"fused": config.train.fused_optimizer, "foreach": not config.train.fused_optimizer}
        if process_group is not None:
            optimizers.append(ZeroRedundancyOptimizer(own, build, process_group, **settings))
        elif own:
            optimizers.append(build(group_by_mesh(own), **settings))
    return optimizers


def group_by_mesh(parameters: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Return parameter groups for an optimizer whose kernels take plain tensors or those of one mesh, never both."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]
