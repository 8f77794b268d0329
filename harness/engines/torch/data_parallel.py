"""What the torch engine asks of the means that keep copies or shards of a model together."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from harness.layout.state_widths import StateKind


class DataParallel(Protocol):
    """How copies or shards of a model are kept together."""

    modules: list[nn.Module]  # the rank's parts of the model as they are called, one for every stage it holds
    names: dict[str, nn.Parameter]  # the model's parameters under their plain names
    host_state: tuple[StateKind, ...]  # see Engine.on_host

    def sync_context(self, last: bool, part: int = 0) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch through a part, and its forward unless others come between."""
        ...

    def collect_grads(self, part: int = 0) -> None:
        """Takes in gradients that autograd left on a part's parameters without running their hooks."""
        ...

    def master_param(self, name: str) -> nn.Parameter:
        """What the optimizer updates for a parameter: itself, or its fp32 master; holds the gradient."""
        ...

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """See Engine.buffers."""
        ...

    def sync_model_params(self) -> None:
        """After the optimizer: brings the model up to what was trained, and lets go of gradients."""
        ...
