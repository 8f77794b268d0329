"""What one rank's host launches on its device in a step: kernels in their streams, and the waits between streams.

The rules of collectives are those of torch's ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): a
collective with async_op=False runs on the current stream. One with async_op=True, which all functional collectives are,
runs on the stream of its group's communicator, which first waits for what the current stream was given before; the
current stream waits for it at Work.wait() or wait_tensor(). NCCL runs the collectives of a communicator one after
another, on whichever streams they are. Sends and receives have the streams of harness.simulator.stage_times.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.autograd import Variable
from torch.distributed import distributed_c10d

from harness.layout.layout import Layout
from harness.layout.rank_groups import group_axes
from harness.measure.collective_rules import NAMESPACES, RULES, CollectiveCall, iter_tensors
from harness.measure.step_profiler import StepListener
from harness.records.rank_report import OUTSIDE_PHASES
from harness.simulator import cuda_api
from harness.simulator.cuda_api import Moment, StreamObserver
from harness.simulator.fake_memory import StorageCounter
from harness.simulator.kernel_work import Collective, HostWork, TransferPart, Transfers, Work, WorkCache
from harness.simulator.stand_ins import around

Stream = str  # "stream 0" is the default stream; others are those of communicators and of the program

PAIR = "pair"  # the first word of a stream for single transfers between two ranks
HOST = "host"  # the place of what the host does or waits for itself


class Launch(NamedTuple):
    """A kernel on a stream, or with work None a point at which the host waits; it begins after other launches."""

    name: str
    work: Work | None
    stream: Stream
    phase: str
    axis: str = ""  # of the mesh, along which a kernel communicates
    after: tuple[int, ...] = ()  # the launches on other streams that it waits for

    @property
    def operator(self) -> str:
        """The launch's phase and operator, by which a report counts its seconds."""
        return f"{self.phase}/{self.name}"


class StreamRecorder(StreamObserver):
    """A recorder of one rank's launches, which is told of operators, of events and of waits."""

    def __init__(self, layout: Layout, rank: int, device_type: str) -> None:
        self.layout, self.rank = layout, rank
        self.launches: list[Launch] = []
        self.phase = OUTSIDE_PHASES
        self._cache = WorkCache(device_type)
        self._last: dict[Stream, Moment] = {}
        self._last_of_communicator: dict[str, Moment] = {}
        self._pending: dict[Stream, Moment] = {}  # what the next launch on a stream has to wait for
        self._works: dict[int, tuple[Any, Moment]] = {}  # by the identity of a Work, which lives as long as it is here
        self._results: dict[int, Moment] = {}  # of functional collectives, by the identity of a result's storage
        self._batch: list[TransferPart] | None = None  # the transfers of a batch that is being launched

    def on_operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Record what an operator launches, or what it waits for."""
        if func.namespace in NAMESPACES:
            self._on_collective(func, args, kwargs, result)
            return
        work = self._cache.work_of(func, args, kwargs, result)
        if work is not None:
            self.launch(func._opname, work, HOST if isinstance(work, HostWork) else current_stream())

    def launch(self, name: str, work: Work | None, stream: Stream, axis: str = "") -> Moment:
        """Record a launch on a stream, and return its moment."""
        after = tuple(self._pending.pop(stream, {}).values())
        self._last[stream] = {stream: len(self.launches)}
        self.launches.append(Launch(name, work, stream, self.phase, axis, after))
        return self._last[stream]

    def moment(self, stream: Stream) -> Moment:
        """Return everything that a stream was given until now."""
        return self._pending.get(stream, {}) | self._last.get(stream, {})

    def wait(self, stream: Stream, moment: Moment | None) -> None:
        """Record that a stream waits for a moment; None is one before the step."""
        pending = self._pending.setdefault(stream, {})
        for other, number in (moment or {}).items():
            if other != stream and pending.get(other, -1) < number:
                pending[other] = number

    def wait_on_host(self, moment: Moment | None) -> None:
        """Record that the host waits for a moment."""
        if moment:
            self.launches.append(Launch("synchronize", None, HOST, self.phase, "", tuple(moment.values())))

    def _on_collective(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        call = CollectiveCall.of(func, args, kwargs)
        if call.operator == "_c10d_functional::wait_tensor":
            self.wait(current_stream(), self._results.pop(call.arguments["tensor"].untyped_storage()._cdata, None))
        elif call.operator in ("c10d::send", "c10d::recv_"):
            self._on_transfer(call, result)
        elif call.operator in RULES and len(call.ranks) > 1:
            self._communicate(func._opname, call, result)

    def _communicate(self, name: str, call: CollectiveCall, result: Any) -> None:
        """Record a collective on the current stream, or on its communicator's, and after that communicator's last."""
        communicator = _group_name(call.group)
        is_synchronous = call.arguments.get("async_op", call.arguments.get("asyncOp", True)) is False
        stream = current_stream() if is_synchronous else f"communicator {communicator}"
        self.wait(stream, self.moment(current_stream()))  # nothing where it is the current stream
        self.wait(stream, self._last_of_communicator.get(communicator))
        size = sum(tensor.nbytes * times for tensor, times in call.moved_tensors())
        work = Collective(call.operation, size, call.ranks)
        moment = self.launch(name, work, stream, group_axes(work.ranks, self.layout))
        self._last_of_communicator[communicator] = moment
        if not is_synchronous:
            self._keep(result, moment)

    def _keep(self, result: Any, moment: Moment) -> None:
        """Remember by what a program can wait for a communication: its Work, or the tensors of its result."""
        work = result[-1] if isinstance(result, tuple) else result
        if isinstance(work, (Tensor, list)):
            storages = (tensor.untyped_storage() for tensor in iter_tensors(work))
            self._results |= {storage._cdata: moment for storage in storages}
        else:
            work = dist.Work.unbox(work)  # type: ignore[attr-defined]
            self._works[id(work)] = (work, moment)

    def _on_transfer(self, call: CollectiveCall, result: Any) -> None:
        """Record a single send or receive, or add it to the batch that is being launched."""
        direction: Literal["send", "receive"] = "send" if call.operator == "c10d::send" else "receive"
        peer = call.ranks[call.arguments["dst" if direction == "send" else "src"]]
        size = sum(tensor.nbytes for tensor in iter_tensors(call.arguments["tensors"]))
        if self._batch is not None:
            self._batch.append((direction, peer, size))
            return
        low, high = sorted((self.rank, peer))
        self._keep(result, self._transfer([(direction, peer, size)], f"{PAIR} {low}:{high}"))

    def _transfer(self, parts: Sequence[TransferPart], stream: Stream) -> Moment:
        self.wait(stream, self.moment(current_stream()))
        work = Transfers(self.rank, tuple(parts))
        ranks = (self.rank, *(peer for _, peer, _ in parts))
        return self.launch("transfer", work, stream, group_axes(ranks, self.layout))

    def wait_for_work(self, work: Any) -> None:
        """Record that the current stream waits for a Work."""
        _, moment = self._works.get(id(work), (None, None))
        self.wait(current_stream(), moment)

    def launch_batch(self, batch_isend_irecv: Any, operations: Sequence[dist.P2POp]) -> Any:
        """Launch transfers by torch's function, and record them as one kernel of the group's communicator."""
        self._batch = []
        works = batch_isend_irecv(operations)
        parts, self._batch = self._batch, None
        group = operations[0].group or distributed_c10d._get_default_group()
        moment = self._transfer(parts, f"communicator {_group_name(group)}")
        self._works |= {id(work): (work, moment) for work in works}
        return works

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Return a context in which this recorder is told of streams and of waits."""

        def recorded_wait(wait: Any, work: Any, *arguments: Any, **keywords: Any) -> Any:
            self.wait_for_work(work)
            return wait(work, *arguments, **keywords)

        def recorded_future(get_future: Any, work: Any) -> Any:
            # DDP asks for futures, for which the current stream waits at the end of backward.
            Variable._execution_engine.queue_callback(lambda: self.wait_for_work(work))
            return get_future(work)

        with (
            around(FakeWork, "wait", recorded_wait),
            around(FakeWork, "get_future", recorded_future),
            around(dist, "batch_isend_irecv", self.launch_batch),
            around(distributed_c10d, "batch_isend_irecv", self.launch_batch),
            mock.patch.object(cuda_api, "observer", self),
        ):
            yield

    @contextmanager
    def listen(self, listener: StepListener, counter: StorageCounter) -> Iterator[None]:
        """Return a context in which this recorder is also told of the phases and operators of a profiled step."""

        @contextmanager
        def phase(phase_of_listener: Any, name: str) -> Iterator[None]:
            outer, self.phase = self.phase, name
            with phase_of_listener(name):
                yield
            self.phase = outer

        def on_operator(*call: Any) -> None:
            if not listener.recorder.is_paused:
                self.on_operator(*call)

        with (
            self.attach(),
            around(listener, "phase", phase),
            mock.patch.object(counter, "on_operator", on_operator),
        ):
            yield


def current_stream() -> Stream:
    """Return the name of the current stream."""
    return cuda_api.current_stream().name


def _group_name(group: dist.ProcessGroup | None) -> str:
    return str((group or distributed_c10d._get_default_group()).group_name)
