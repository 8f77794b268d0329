"""The profiled step: the same step once more, slowly, with every operator heard."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.engines.base import Engine
from harness.layout.layout import Layout, group_axes, is_data_parallel_axis
from harness.measure import memory_snapshot
from harness.measure.activations import ActivationMeter
from harness.measure.communication import Collective, CommunicationCounter
from harness.measure.gradient_fingerprint import GradientFingerprints
from harness.measure.kernels import KernelUse
from harness.measure.memory import DeviceMemory
from harness.measure.memory_attribution import (
    AllocationLog,
    OpSpan,
    StepAnnotations,
    attribute_peak,
    attribute_peak_by_example,
    name_at,
)
from harness.measure.rank_state import bytes_by_device, held_bytes, held_shards
from harness.probe import Listener, Probe, ShardSource
from harness.records.schema import AtPeak, ProfiledStep
from harness.tensors.flops import operator_flops
from harness.tensors.shard import BUCKET, GATHERED, STAGING
from harness.tensors.storage import element_bytes, storage_bytes, storages

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")

_PACKING_NAMESPACES = ("fsdp",)  # operators that copy into and out of what goes over the wire


@contextmanager
def profile_step(
    engine: Engine, probe: Probe, memory: DeviceMemory, seed: int, layout: Layout
) -> Iterator["StepListener"]:
    """Listens to the one step inside; the listener's result() is complete afterwards."""
    listener = StepListener(engine, memory, seed, layout)
    with probe.listen(listener), listener:
        yield listener


class StepListener(Listener):
    """Follows one step: gradients and activations held, bytes sent, operations done, and whose every block is."""

    def __init__(self, engine: Engine, memory: DeviceMemory, seed: int, layout: Layout) -> None:
        self.engine = engine
        self.memory = memory
        self.layout = layout
        self.statistics = GradientFingerprints(seed, memory.device)
        self.activations = ActivationMeter(engine.model, self.on_activation, memory.device)
        self.communication = CommunicationCounter(self.on_collective)
        self.notes = StepAnnotations()
        self.kernels = KernelUse()
        self.buckets: set[int] = set()  # addresses of those that hold gradients
        self.flops = 0
        self.most_gradient_bytes = 0
        self.placed_gradients: dict[str, int] = {}
        self.gradient_dtypes: set[str] = set()
        self.recomputations = 0
        self.in_flight = self.most_in_flight = self.split_backwards = 0
        self.highest = 0
        self.peak_allocated_bytes: int | None = None
        self.log: AllocationLog | None = None
        self.paused = False
        self.stack = ExitStack()

    def __enter__(self) -> "StepListener":
        self.memory.reset_peak()
        self.history = self.memory.begin_log() if self.memory.can_log else None
        with self.pause():
            self.claim_state()
        for part in (self.activations, self.communication, OperatorWatch(self)):
            self.stack.enter_context(part)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
        self.note_peak()
        if self.history is not None:
            self.log = self.history.end()

    def log_position(self) -> int:
        return self.history.now() if self.history is not None else 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self.log_position()
        splits = name == "backward_input"
        before = self.gradients_now() if splits else []
        self.in_flight += name == "forward"
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        yield
        self.in_flight -= name in ("backward", "backward_weight")
        self.split_backwards += splits and self.gradients_now() == before
        self.sample_gradients(gradients=True)
        self.notes.phases.append(OpSpan(began, self.log_position(), name))

    def gradients_now(self) -> list[tuple[str, int, int]]:
        """What tells whether a gradient was made or changed."""
        with self.pause():
            pieces = self.engine.local_shards("gradients")
            return [(piece.name, piece.local.data_ptr(), piece.local._version) for piece in pieces]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        self.recomputations += 1
        with self.activations.recompute():
            yield

    def kept(self, tensor: Tensor) -> None:
        self.activations.watch(tensor)

    def offloaded(self, tensor: Tensor) -> None:
        self.activations.offloaded(tensor)

    def gradients_ready(self, engine: ShardSource) -> None:
        """Takes the statistics with the watch closed: the memory they need is not the step's."""
        self.sample_gradients(gradients=True)
        with self.pause():
            self.statistics.gradients_ready(engine)
            self.placed_gradients = bytes_by_device(engine, "gradients")
            self.gradient_dtypes = {held.dtype for held in held_shards(engine, "gradients") if held.slot != STAGING}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is the measuring's own: its blocks are not the step's."""
        self.note_peak()
        self.paused, began = True, self.log_position()
        yield
        self.paused, ended = False, self.log_position()
        self.memory.reset_peak()
        if ended > began:
            self.notes.pauses.append(OpSpan(began, ended, "measuring"))

    def on_operator(self, name: str, began: int) -> None:
        """One has run since `began`."""
        if self.paused:
            return
        self.kernels.record(name)
        now = self.log_position()
        if now > began:
            self.notes.operators.append(OpSpan(began, now, name))
        self.sample_gradients()

    def sample_gradients(self, gradients: bool = False) -> None:
        """Claims what can be seen now, where memory is fuller than before or gradients may be at their most."""
        if self.paused:
            return
        peak = self.memory.peak_allocated_bytes() or 0
        if peak <= self.highest and not gradients:
            return
        self.highest = max(self.highest, peak)
        with self.pause():
            self.claim_gradients()
            self.most_gradient_bytes = max(self.most_gradient_bytes, held_bytes(self.engine, "gradients"))

    def note_peak(self) -> None:
        peak = self.memory.peak_allocated_bytes()
        if peak is not None:
            self.peak_allocated_bytes = max(peak, self.peak_allocated_bytes or 0)

    def claim(self, tensors: Iterable[Tensor], role: str, what: str) -> None:
        if self.history is None:
            return
        now = self.log_position()
        for tensor in tensors:
            for storage in storages(tensor):
                if storage.device == self.memory.device.type:  # what is offloaded is not in this memory
                    self.notes.claim(now, storage.address, role, what)

    def claim_state(self) -> None:
        """What is held between steps."""
        self.claim((piece.local for piece in self.engine.local_shards("optimizer")), "optimizer", "masters and moments")
        at_rest = (piece.local for piece in self.engine.local_shards("parameters") if piece.state_name != GATHERED)
        self.claim(at_rest, "parameter", "at rest")
        self.claim_gradients()

    def claim_gradients(self) -> None:
        """Gradients, and what modules hold of parameters at this moment: at rest claimed before, else gathered."""
        pieces = list(self.engine.local_shards("gradients"))
        self.claim((piece.local for piece in pieces), "gradient", "gradients")
        in_buckets = {s.address for piece in pieces if piece.state_name == BUCKET for s in storages(piece.local)}
        if self.history is not None:
            for address in self.buckets - in_buckets:  # copied out: DDP's buckets hold gradients for a while only
                self.notes.claim(self.log_position(), address, "gradient", "gradients", held=False)
        self.buckets = in_buckets
        parameters = list(self.engine.model.parameters())
        self.claim(parameters, "gathered", "parameters made whole")
        for role, what, tensor in self.engine.named_buffers():
            self.claim([tensor], role, what)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        own = (gradient for gradient in gradients if storage_bytes([gradient]) == element_bytes([gradient]))
        self.claim(own, "communication", "gradients not yet reduced")

    def on_activation(self, address: int, held: bool) -> None:
        """An activation, or one no longer."""
        if self.history is not None and not self.paused:
            self.notes.claim(self.log_position(), address, "activation", "held for backward", held)

    def on_collective(self, heard: Collective) -> None:
        along_data = is_data_parallel_axis(group_axes(heard.group_ranks, self.layout))
        # Keys and values are gathered along such ranks too, by an operator of autograd's.
        gathered = heard.operation == "all_gather" and along_data and heard.operator.startswith("c10d::")
        what = f"{heard.operation} buffers"
        self.claim(heard.tensors, "gathered" if gathered else "communication", what)

    def at_peak(self, timed: AllocationLog | None) -> AtPeak | None:
        """What filled the peak of the timed steps where their log is given and they were like this one, else of this.

        Raises RuntimeError if the log's peak is not the allocator's.
        """
        if self.log is None or not (self.history and self.history.is_whole):
            return None
        own = attribute_peak(self.log, self.notes)
        if self.memory.counts_requests and own.bytes != self.peak_allocated_bytes:
            raise RuntimeError(f"blocks of {own.bytes} bytes are logged at the peak of {self.peak_allocated_bytes}")
        found = (attribute_peak_by_example(timed, self.log, self.notes) if timed is not None else None) or own
        phase = name_at(sorted(self.notes.phases), found.moment, "between")
        return AtPeak(phase, found.bytes, tuple(part._asdict() for part in found.parts))

    def keep_snapshot(self, path: Path) -> None:
        if self.history is not None:
            memory_snapshot.write_snapshot(path, self.history.snapshot(self.notes))

    def result(self, timed: AllocationLog | None) -> ProfiledStep:
        """`timed` is the log of the fullest of the timed steps."""
        return ProfiledStep(
            self.statistics.found,
            self.most_gradient_bytes,
            self.placed_gradients,
            tuple(sorted(self.gradient_dtypes)),
            self.activations.most_bytes,
            self.activations.most_offloaded_bytes,
            self.recomputations,
            self.most_in_flight,
            self.split_backwards,
            self.flops,
            self.peak_allocated_bytes,
            self.at_peak(timed),
            self.communication.traffic(),
            tuple(sorted(self.kernels.attention)),
            tuple(sorted(self.kernels.optimizer)),
            not self.kernels.activation_functions,
        )


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the listener of every operator; before a collective too, when gradients about to be reduced are whole."""

    def __init__(self, listener: StepListener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener = listener

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch would run compiled code operator by operator for as long as somebody listens."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it come back as the plain operators it is made of
        listener, kwargs = self.listener, kwargs or {}
        if func.namespace in _COLLECTIVE_NAMESPACES:
            listener.sample_gradients(gradients=True)
        began = listener.log_position()
        result = func(*args, **kwargs)
        if func.namespace in _PACKING_NAMESPACES:
            listener.claim(tensors_in((args, kwargs, result)), "communication", f"{func._schema.name} buffers")
        listener.flops += 0 if listener.paused else operator_flops(func, args, kwargs, result)
        listener.on_operator(func._schema.name, began)
        return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    leaves: list[Any] = tree_leaves(value)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))
