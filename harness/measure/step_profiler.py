"""The profiled step: one more training step, slower than the others, in which every operator is observed."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import DispatchKey
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines.base import Engine
from harness.layout.layout import Layout
from harness.layout.rank_groups import group_axes, is_data_parallel_axis
from harness.measure.activations import ActivationMeter
from harness.measure.allocation_log import AllocationLog
from harness.measure.collective_rules import NAMESPACES, SENDS_NOTHING, CollectiveCall, iter_tensors
from harness.measure.communication import CommunicationCounter
from harness.measure.dropout_masks import DRAWING, MaskObserver
from harness.measure.gradient_fingerprint import Fingerprinter, GradientFingerprints
from harness.measure.kernels import ACTIVATION_FUNCTIONS, OPTIMIZER, attention_kernel
from harness.measure.memory import DeviceMemory
from harness.measure.memory_ownership import OwnershipRecorder, bytes_by_device, state_shards
from harness.models.build import compiled_graph_count
from harness.models.float8 import ScaledProducts
from harness.probe import Listener, Probe, ShardSource
from harness.records.rank_report import ProfiledStep
from harness.tensors.flops import has_flops, operator_flops
from harness.tensors.shard import STAGING

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")

_PACKING_NAMESPACES = ("fsdp",)  # operators that copy into and out of communication buffers


@contextmanager
def profile_step(
    engine: Engine,
    probe: Probe,
    memory: DeviceMemory,
    fingerprinter: Fingerprinter,
    layout: Layout,
    progress: Callable[[str, int], None] = lambda *_: None,
    step: int = 0,
) -> Iterator["StepListener"]:
    """Profile the one step inside the block; the listener's result() is complete afterwards.

    `progress` is called with the number of the step in every phase, because many micro-batches can take minutes.
    """
    listener = StepListener(engine, memory, fingerprinter, layout, partial(progress, "profiled", step))
    watch = OperatorWatchBesideDynamo if compiled_graph_count() else OperatorWatch
    listener.recorder.start()
    with probe.listen(listener), listener.activations.measure(), watch(listener):
        yield listener
    listener.recorder.end()


class StepListener(Listener):
    """A listener to one step that measures gradients, activations, bytes sent, FLOPs, and the role of every block."""

    def __init__(
        self,
        engine: Engine,
        memory: DeviceMemory,
        fingerprinter: Fingerprinter,
        layout: Layout,
        progress: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.progress = progress
        self.memory = memory
        self.layout = layout
        self.recorder = OwnershipRecorder(engine, memory)
        self.gradient_fingerprints = GradientFingerprints(fingerprinter)
        self.activations = ActivationMeter(engine.model, self.recorder.claim_activation, memory.device)
        self.communication = CommunicationCounter(self.on_collective)
        self.operators: set[str] = set()  # the names of those that ran
        self.attention_kernels: set[str] = set()
        self.flops, self.scaled = 0, ScaledProducts(engine.model)
        self.is_updating = False  # the optimizer's own products are not the model's
        self.peak_gradient_bytes = 0
        self.gradient_bytes_by_device: dict[str, int] = {}
        self.gradient_dtypes: set[str] = set()
        self.expert_tokens: dict[int, Tensor] = {}  # by layer
        self.masks, self.is_second_forward = MaskObserver(), False
        self.recomputations = 0
        self.in_flight = self.max_in_flight = self.split_backwards = 0
        self.sampled_peak_bytes = 0  # the highest peak at which gradients were sampled

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Observe a phase of the step: count micro-batches in flight and split backwards, and sample gradients."""
        self.progress()
        started = self.recorder.position()
        splits = name == "backward_input"
        before = self._gradient_versions() if splits else []
        self.is_updating = name == "optimizer"
        self.in_flight += name == "forward"
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        yield
        self.in_flight -= name in ("backward", "backward_weight")
        self.split_backwards += splits and self._gradient_versions() == before
        self.sample_gradients(may_be_largest=True)
        self.recorder.add_phase(name, started)

    def _gradient_versions(self) -> list[tuple[str, int, int]]:
        """Return a value that changes when a gradient is created or modified."""
        with self.recorder.pause():
            shards = self.engine.local_shards("gradients")
            return [(shard.name, shard.local.data_ptr(), shard.local._version) for shard in shards]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Count the second forward of a checkpointed part, and the activations that it saves."""
        self.recomputations += 1
        self.is_second_forward = True
        try:
            with self.activations.recompute():
                yield
        finally:  # torch ends a second forward early by an exception
            self.is_second_forward = False

    def drawn(self, mask: Tensor) -> None:
        """Observe a mask that was drawn, outside of the step's memory."""
        with self.recorder.pause():
            self.masks.observe(mask, self.is_second_forward)

    def routed(self, layer: int, counts: Tensor) -> None:
        """Add up how many of this rank's tokens go to each expert, without second forwards."""
        if not self.is_second_forward:
            with self.recorder.pause():
                self.expert_tokens[layer] = counts + self.expert_tokens.get(layer, 0)

    def count(self, operands: Sequence[Any], flops: int) -> None:
        """Count a product's operations, and by its recipe those of scaled operands, outside of the step's memory."""
        self.flops += flops
        with self.recorder.pause():
            self.scaled.observe(operands, flops)

    def saved_for_recompute(self, tensor: Tensor) -> None:
        """Count a result that is saved for a second forward, outside autograd."""
        self.activations.watch(tensor)

    def offloaded(self, tensor: Tensor) -> None:
        """Count a tensor on the host that holds an offloaded activation."""
        self.activations.offloaded(tensor)

    def gradients_ready(self, engine: ShardSource) -> None:
        """Measure the reduced gradients. The recorder pauses: the memory that this needs is not the step's."""
        self.sample_gradients(may_be_largest=True)
        with self.recorder.pause():
            self.gradient_fingerprints.gradients_ready(engine)
            self.gradient_bytes_by_device = bytes_by_device(engine, "gradients")
            shards = state_shards(engine, "gradients")
            self.gradient_dtypes = {shard.dtype for shard in shards if shard.state_name != STAGING}

    def sample_gradients(self, may_be_largest: bool = False) -> None:
        """Claim and measure the present gradients if memory has a new peak or gradients may be at their largest."""
        if self.recorder.is_paused:
            return
        peak = self.memory.peak_allocated_bytes() or 0
        if peak <= self.sampled_peak_bytes and not may_be_largest:
            return
        self.sampled_peak_bytes = max(self.sampled_peak_bytes, peak)
        with self.recorder.pause():
            self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.recorder.claim_gradients())

    def on_collective(self, call: CollectiveCall, tensors: list[Tensor]) -> None:
        """Claim the buffers of a collective: those of a data-parallel all-gather are gathered parameters."""
        # Keys and values are gathered among the same ranks too, but by an operator outside of c10d's namespace.
        gathers = call.operation == "all_gather" and call.operator.startswith("c10d::")
        of_parameters = gathers and is_data_parallel_axis(group_axes(call.ranks, self.layout))
        self.recorder.claim(tensors, "gathered" if of_parameters else "communication", f"{call.operation} buffers")

    def routing(self) -> list[tuple[int, list[int]]]:
        """Return how many of this rank's tokens went to each expert of its layers, by the layers' indices."""
        return [(layer, counts.tolist()) for layer, counts in self.expert_tokens.items()]

    def result(self, timed_log: AllocationLog | None) -> ProfiledStep:
        """Return the measurements. `timed_log` is the allocation log of the timed step with the highest peak."""
        return ProfiledStep(
            gradient_bytes=self.peak_gradient_bytes,
            gradient_bytes_by_device=self.gradient_bytes_by_device,
            gradient_dtypes=tuple(sorted(self.gradient_dtypes)),
            activation_bytes=self.activations.peak_bytes,
            offloaded_activation_bytes=self.activations.peak_offloaded_bytes,
            recomputations=self.recomputations,
            max_in_flight_micro_batches=self.max_in_flight,
            split_backwards=self.split_backwards,
            flops=self.flops,
            scaled_flops=self.scaled.flops(),
            least_scaled_range=self.scaled.least_range(),
            peak_allocated_bytes=self.recorder.peak_allocated_bytes,
            at_peak=self.recorder.at_peak(timed_log),
            peak_without_backend_bytes=self.recorder.peak_without_backend_bytes(timed_log),
            communication=self.communication.traffic(),
            attention_kernels=sorted(self.attention_kernels),
            optimizers=sorted({OPTIMIZER[name] for name in self.operators & OPTIMIZER.keys()}),
            masks=self.masks.report(),
            layers_compiled=self.operators.isdisjoint(ACTIVATION_FUNCTIONS),
        )


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that reports every operator to the listener, where nothing is compiled.

    It also samples gradients before a collective, because gradients that are about to be reduced are still whole then.
    """

    def __init__(self, listener: StepListener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener = listener

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False so that torch does not switch Dynamo off and on again around every operator.

        That takes about as long as the rest of this mode, and Dynamo is on only where something is compiled.
        """
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True so that torch does not run compiled code operator by operator while this mode is entered."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # torch dispatches the plain operators that it consists of afterwards
        listener, recorder, kwargs = self.listener, self.listener.recorder, kwargs or {}
        if recorder.is_paused or func.namespace == "prim":  # run by the measurement, or the question for a device
            return func(*args, **kwargs)
        operator = known_operator(func)
        if operator.sends:
            listener.sample_gradients(may_be_largest=True)
        started = recorder.position()
        result = listener.communication.run(func, args, kwargs) if operator.communicates else func(*args, **kwargs)
        if operator.packs:
            tensors = iter_tensors([args, list(kwargs.values()), result])
            recorder.claim(tensors, "communication", f"{operator.name} buffers")
        if operator.has_flops and not listener.is_updating:
            listener.count(args, operator_flops(func, args, kwargs, result))
        listener.operators.add(operator.name)
        if kernel := attention_kernel(operator.name, *args[:1]):
            listener.attention_kernels.add(kernel)
        if operator.name in DRAWING:
            listener.drawn(DRAWING[operator.name](result))
        if recorder.add_operator(operator.name, started, operator.is_view):  # else memory has no new peak
            listener.sample_gradients()
        return result


class OperatorWatchBesideDynamo(OperatorWatch):  # type: ignore[no-untyped-call]
    """The mode for a model with compiled parts, which torch keeps Dynamo from compiling."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True, as torch does for modes that do not say anything."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class KnownOperator(NamedTuple):
    """What the profiled step needs to know of an operator, which does not depend on its arguments."""

    name: str  # such as aten::mm
    communicates: bool  # whether it is counted
    sends: bool  # whether gradients may be about to be reduced
    packs: bool
    has_flops: bool
    is_view: bool  # whether its results are tensors in the memory of its arguments, which it does not write


@functools.cache
def known_operator(func: Any) -> KnownOperator:
    """Return what is known of an operator; most of a step's thousands of operators are the same few."""
    name = func._schema.name
    aliases = [result.alias_info for result in func._schema.returns]
    is_composite = func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)  # aten::to may copy
    return KnownOperator(
        name,
        communicates=func.namespace in NAMESPACES,
        sends=func.namespace in _COLLECTIVE_NAMESPACES and name not in SENDS_NOTHING,
        packs=func.namespace in _PACKING_NAMESPACES,
        has_flops=has_flops(func),
        is_view=not is_composite and bool(aliases) and not any(alias is None or alias.is_write for alias in aliases),
    )
