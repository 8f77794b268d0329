"""What the torch engine asks of the means that keep copies or shards of a model together."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from harness.engines import Kind


class DataParallel(Protocol):
    """How copies or shards of a model are kept together."""

    module: nn.Module  # what is called where the rank holds the whole depth
    names: dict[str, nn.Parameter]  # the model's parameters under their plain names
    on_host: tuple[Kind, ...]  # see Engine.on_host

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch."""
        ...

    def collect(self) -> None:
        """Takes in gradients that autograd left on the parameters without running their hooks."""
        ...

    def trained(self, name: str) -> nn.Parameter:
        """What the optimizer updates for a parameter: itself, or its fp32 master; holds the gradient."""
        ...

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """See Engine.buffers."""
        ...

    def publish(self) -> None:
        """After the optimizer: brings the model up to what was trained, and drops gradients."""
        ...
