"""The probe through which an engine announces phases, gradients and recomputation; it is free without a listener."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from harness.layout.state_widths import StateKind
    from harness.tensors.shard import Shard


# A split backward computes the gradient of its input first and those of its weights later (zero bubble schedules).
COMPUTE_PHASES = ("forward", "backward", "backward_input", "backward_weight")

# The phase data prepares the batch; reduce is the reduction of gradients after the last backward, where backward does
# not include it; norm computes the norm of the gradients over all ranks, where the optimizer does not include it.
PHASES = ("data", *COMPUTE_PHASES, "reduce", "norm", "optimizer")


class ShardSource(Protocol):
    """The part of an engine that a listener may use."""

    def local_shards(self, kind: "StateKind") -> "Iterable[Shard]":
        """Return the shards of a kind of model state that this rank holds now."""
        ...


class Probe:
    """The object to which an engine announces the parts of a step; the training loop sets a listener for some steps."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    @contextmanager
    def listen(self, listener: "Listener") -> Iterator[None]:
        """Set the listener for the steps inside this context."""
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for one of PHASES."""
        return self.listener.phase(name) if self.listener else nullcontext()

    def recompute(self) -> "Recompute":
        """Return a context for the recomputation of a checkpointed part; a backward in two halves enters it twice."""
        return Recompute(self)

    def saved_for_recompute(self, tensor: "Tensor") -> None:
        """Announce a result that is saved for recomputation, which autograd does not see."""
        if self.listener:
            self.listener.saved_for_recompute(tensor)

    def offloaded(self, tensor: "Tensor") -> None:
        """Announce a new tensor on the host that holds what was saved for backward."""
        if self.listener:
            self.listener.offloaded(tensor)

    def routed(self, layer: int, counts: "Tensor") -> None:
        """Announce how many of this rank's tokens go to each expert (experts,) of a layer in a forward."""
        if self.listener:
            self.listener.routed(layer, counts)

    def gradients_ready(self, engine: "ShardSource") -> None:
        """Announce, once a step, that gradients are reduced and averaged over the global batch, and not yet clipped."""
        if self.listener:
            self.listener.gradients_ready(engine)


class Recompute:
    """A context that looks up the probe's listener when it is entered; torch stores one for every checkpointed part."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.entered: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self.entered = self.probe.listener.recompute() if self.probe.listener else nullcontext()
        self.entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


class Listener:
    """A listener that ignores everything; the base class of those that measure."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround one of PHASES."""
        yield

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Surround the recomputation of a checkpointed part."""
        yield

    def saved_for_recompute(self, tensor: "Tensor") -> None:
        """Notice a result that is saved for recomputation."""

    def offloaded(self, tensor: "Tensor") -> None:
        """Notice a new tensor on the host that holds what was saved for backward."""

    def routed(self, layer: int, counts: "Tensor") -> None:
        """Notice how many tokens go to each expert of a layer."""

    def gradients_ready(self, engine: "ShardSource") -> None:
        """Observe the step's gradients, which are reduced and not yet clipped."""
