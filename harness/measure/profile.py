"""The profiled step: the same step once more, slowly, with every operator heard."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines import Engine
from harness.measure.activations import ActivationMeter
from harness.measure.communication import CommunicationCounter, Traffic
from harness.measure.gradients import GradientStatistic, GradientStatistics
from harness.measure.memory import DeviceMemory
from harness.measure.probe import Listener, Probe
from harness.measure.state import held_bytes

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


class AtPeak(NamedTuple):
    """What filled the memory when it was fullest, in bytes, and the phase that was in.

    Parameters and optimizer are those at rest: copies gathered for compute are part of the rest, `other`, as are
    buffers and temporaries.
    """

    phase: str
    allocated_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int


class ProfiledStep(NamedTuple):
    gradients: list[GradientStatistic]
    gradient_bytes: int  # the most held during the step
    activation_bytes: int  # the most held for backward during the step
    recomputations: int  # second forwards of checkpointed parts
    in_flight: int  # the most forwards whose backward was not finished
    split_backwards: int  # whose first half, for inputs, left the gradients of weights alone
    at_peak: AtPeak | None  # None where memory is not counted
    communication: tuple[Traffic, ...]


@contextmanager
def profiling(engine: Engine, probe: Probe, memory: DeviceMemory, seed: int) -> Iterator["StepListener"]:
    """Listens to the one step inside; the listener's result() is complete afterwards."""
    listener = StepListener(engine, memory, seed)
    with probe.listening(listener), listener:
        yield listener


class StepListener(Listener):
    """Follows one step: gradients and activations held, bytes sent, and the moment of the peak."""

    def __init__(self, engine: Engine, memory: DeviceMemory, seed: int) -> None:
        self.engine = engine
        self.memory = memory
        self.statistics = GradientStatistics(seed)
        self.activations = ActivationMeter(engine.model)
        self.communication = CommunicationCounter()
        self.phase_now = "between"
        self.state_bytes = {kind: held_bytes(engine, kind) for kind in ("parameters", "optimizer")}  # type: ignore[arg-type]
        self.most_gradient_bytes = 0
        self.recomputations = 0
        self.in_flight = self.most_in_flight = self.split_backwards = 0
        self.at_peak: AtPeak | None = None
        self.paused = False
        self.stack = ExitStack()

    def __enter__(self) -> "StepListener":
        self.memory.reset_peak()
        for part in (self.activations, self.communication, Watch(self.look)):
            self.stack.enter_context(part)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phase_now = name
        before = self.gradients_now() if name == "backward_input" else []
        self.in_flight += name == "forward"
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        yield
        self.in_flight -= name in ("backward", "backward_weight")
        self.split_backwards += name == "backward_input" and self.gradients_now() == before
        self.look(gradients=True)
        self.phase_now = "between"

    def gradients_now(self) -> list[tuple[str, int, int]]:
        """What tells whether a gradient was made or changed."""
        pieces = self.engine.pieces("gradients")
        return [(piece.name, piece.local.data_ptr(), piece.local._version) for piece in pieces]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        self.recomputations += 1
        with self.activations.recompute():
            yield

    def gradients_ready(self, engine: Engine) -> None:
        """Takes the statistics with the watch closed: the memory they need is not the step's."""
        self.look(gradients=True)
        self.paused = True
        self.statistics.gradients_ready(engine)
        self.memory.reset_peak()
        self.paused = False

    def look(self, gradients: bool = False) -> None:
        """Notes a new peak and what fills it; gradients also where they may be at their most."""
        if self.paused:
            return
        peak = self.memory.peak_allocated_bytes()
        higher = peak is not None and (self.at_peak is None or peak > self.at_peak.allocated_bytes)
        if not (higher or gradients):
            return
        gradient_bytes = held_bytes(self.engine, "gradients")
        self.most_gradient_bytes = max(self.most_gradient_bytes, gradient_bytes)
        if higher and peak is not None:
            self.at_peak = AtPeak(
                self.phase_now,
                peak,
                self.state_bytes["parameters"],
                gradient_bytes,
                self.state_bytes["optimizer"],
                self.activations.held_bytes,
            )

    def result(self) -> ProfiledStep:
        return ProfiledStep(
            self.statistics.found,
            self.most_gradient_bytes,
            self.activations.most_bytes,
            self.recomputations,
            self.most_in_flight,
            self.split_backwards,
            self.at_peak,
            self.communication.traffic(),
        )


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls back after every operator; before a collective too, when gradients about to be reduced are still whole."""

    def __init__(self, look: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it come back as the plain operators it is made of
        if func.namespace in _COLLECTIVE_NAMESPACES:
            self.look(gradients=True)
        result = func(*args, **(kwargs or {}))
        self.look()
        return result
