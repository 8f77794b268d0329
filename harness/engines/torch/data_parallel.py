"""The interface through which the torch engine drives DDP, FSDP2 or a single copy of the model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from harness.layout.state_widths import StateKind


class DataParallel(Protocol):
    """The copies or shards of a model, and how they are synchronized.

    A rank holds one part of the model for each of its pipeline stages; `part` is the index of one.
    """

    modules: list[nn.Module]  # this rank's parts of the model, in their wrappers
    parameters: dict[str, nn.Parameter]  # the model's parameters under their plain names
    host_state: tuple[StateKind, ...]  # see Engine.host_state

    def sync_context(self, last: bool, part: int = 0) -> AbstractContextManager[None]:
        """Return a context for one micro-batch's backward through a part; `last` says whether it is the step's last.

        It covers the forward too, unless a schedule runs other passes in between.
        """

    def collect_grads(self, part: int = 0) -> None:
        """Collect the gradients that autograd left on a part's parameters without running their hooks."""

    def reduce_experts(self) -> None:
        """Average the step's gradients of experts that expert parallelism divides, if backward has not done so."""

    def master_param(self, name: str) -> nn.Parameter:
        """Return the tensor that the optimizer updates and that has the gradient: the parameter or its fp32 master."""

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (role, label, tensor) for every communication buffer; see Engine.named_buffers."""

    def sync_model_params(self) -> None:
        """Copy the updated masters into the model and free the gradients, after the optimizer's step."""


def master_params(parallel: DataParallel) -> dict[str, nn.Parameter]:
    """Return by name the tensor that the optimizer updates for each trained parameter of the model, in their order."""
    trained = (name for name, parameter in parallel.parameters.items() if parameter.requires_grad)
    return {name: parallel.master_param(name) for name in trained}
