"""What the loop listens with. Off, it costs nothing; on, it hears an engine's phases, gradients and recomputation."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from harness.layout.state_widths import StateKind
    from harness.tensors.shard import Shard


# A split backward computes the gradient of its input first and those of its weights later (zero bubble schedules).
# data: making the batch. reduce: gradients synchronised after the last backward, where that is not part of it. norm:
# of the gradients over all ranks, where that is not part of the optimizer.
COMPUTE_PHASES = ("forward", "backward", "backward_input", "backward_weight")

PHASES = ("data", *COMPUTE_PHASES, "reduce", "norm", "optimizer")


class ShardSource(Protocol):
    """What a listener may ask an engine for."""

    def local_shards(self, kind: "StateKind") -> "Iterable[Shard]":
        """Return what this rank holds of a kind of model state at this moment."""
        ...


class Probe:
    """Handed to an engine when it is built; `listener` is set by the loop for the steps it wants to hear."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    @contextmanager
    def listen(self, listener: "Listener") -> Iterator[None]:
        """Sets the listener for the steps inside."""
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of the step: one of PHASES."""
        return self.listener.phase(name) if self.listener else nullcontext()

    def recompute(self) -> "Recompute":
        """Around the second forward of a checkpointed part; a backward in two halves enters it twice."""
        return Recompute(self)

    def saved_for_recompute(self, tensor: "Tensor") -> None:
        """A result is kept for a second forward, past autograd, as long as its memory is."""
        if self.listener:
            self.listener.saved_for_recompute(tensor)

    def offloaded(self, tensor: "Tensor") -> None:
        """Of every tensor on the host that holds what was saved for backward, when it is made."""
        if self.listener:
            self.listener.offloaded(tensor)

    def gradients_ready(self, engine: "ShardSource") -> None:
        """Once a step: gradients are reduced and averaged over the global batch, and not yet clipped."""
        if self.listener:
            self.listener.gradients_ready(engine)


class Recompute:
    """Tells whoever listens when it is entered; torch makes one for every checkpointed part and keeps it."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.entered: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self.entered = self.probe.listener.recompute() if self.probe.listener else nullcontext()
        self.entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


class Listener:
    """Hears nothing; the base of those that do."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def recompute(self) -> Iterator[None]:
        yield

    def saved_for_recompute(self, tensor: "Tensor") -> None:
        pass

    def offloaded(self, tensor: "Tensor") -> None:
        pass

    def gradients_ready(self, engine: "ShardSource") -> None:
        pass
