"""The evidence of a training's first update, while all layouts still have the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harness.config.optimizer import OptimizerSpec
from harness.engines.base import Engine
from harness.measure.gradient_fingerprint import Fingerprinter, GradientFingerprints
from harness.measure.memory import DeviceMemory
from harness.probe import Probe
from harness.records.tensor_shards import TensorFingerprint


class FirstUpdate:
    """The fingerprints of the first step that updates: gradients, first moments, and the changes of parameters.

    Under loss scaling, steps before it are skipped because gradients overflow.
    """

    def __init__(
        self, engine: Engine, probe: Probe, fingerprinter: Fingerprinter, memory: DeviceMemory, optimizer: OptimizerSpec
    ) -> None:
        self.engine = engine
        self.probe = probe
        self.fingerprinter = fingerprinter
        self.memory = memory
        self.optimizer = optimizer
        self.listener = GradientFingerprints(fingerprinter, memory.limit.suspended)
        self.moments: Sequence[TensorFingerprint] | None = None  # of clipped gradients
        self.changes: Sequence[TensorFingerprint] = ()

    @property
    def gradients(self) -> Sequence[TensorFingerprint]:
        """The fingerprints of the gradients before clipping."""
        return self.listener.fingerprints

    @contextmanager
    def watch(self, index: int) -> Iterator[None]:
        """Watch step number `index`, if no step before it has updated."""
        if self.moments is not None:
            yield
            return
        with self.probe.listen(self.listener):
            yield
        if self.engine.skipped_steps > index:  # gradients overflowed, and a smaller loss scale is next
            return
        with self.memory.limit.suspended():
            self.moments = self.fingerprinter.state(self.engine, "optimizer", self.optimizer.gradient_state)
            self.changes = self.fingerprinter.updates(self.engine)
        self.memory.empty_cache()  # the fingerprints needed this memory
