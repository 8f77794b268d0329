"""Masters and their 16-bit copies: one operator publishes an update."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines.torch.ddp import ReplicatedParams
from harness.models.build import build_model
from tests.support.commands import compose_config


class Operators(TorchDispatchMode):
    """A counter of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def replicated(precision: str) -> ReplicatedParams:
    config = compose_config("strategy=single", f"precision={precision}", "model.num_hidden_layers=1")
    return ReplicatedParams([build_model(config.model)], config, torch.device("cpu"))


def test_one_operator_copies_all_masters() -> None:
    params = replicated("bf16_mixed")
    assert len(params.masters) > 5
    with torch.no_grad():
        for master in params.masters.values():
            master.add_(torch.randn(master.shape))
            master.grad = torch.ones_like(master)
    with Operators() as operators:
        params.sync_model_params()
    assert operators.counts == {"aten::_foreach_copy_": 1}
    for name, master in params.masters.items():
        assert torch.equal(params.parameters[name], master.to(torch.bfloat16)) and master.grad is None


def test_gradients_that_are_bucket_views_are_zeroed_by_one_operator() -> None:
    params = replicated("fp32")
    params.accumulates_in_buckets = True
    for parameter in params.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with Operators() as operators:
        params.sync_model_params()
    assert operators.counts == {"aten::_foreach_zero_": 1}
    gradients: list[Tensor | None] = [parameter.grad for parameter in params.parameters.values()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
