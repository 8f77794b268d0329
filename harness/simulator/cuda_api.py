"""Stand-ins for the functions of torch.cuda that a CPU build lacks: one device, whose work is done at once."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_numbers = itertools.count()


Moment = dict[str, int]  # the last launch on each of some streams


class StreamObserver:
    """An observer of streams that notices nothing; others say what a stream was given, and notice what waits for it."""

    def moment(self, stream: str) -> Moment | None:
        """Return what a stream was given until now."""
        return None

    def wait(self, stream: str, moment: Moment | None) -> None:
        """Notice that a stream waits for a moment, None being one that was not observed."""

    def wait_on_host(self, moment: Moment | None) -> None:
        """Notice that the host waits for a moment."""


observer = StreamObserver()


class SimulatedStream:
    """A stream in the place of torch.cuda.Stream, whose work is done at once; its waits are told to the observer.

    Blocks of memory belong to the stream that is current when they are allocated, so that streams are told apart.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.number = next(_numbers)  # the default stream's is 0
        self.name = f"stream {self.number}"  # by which the observer knows it

    def wait_stream(self, stream: "SimulatedStream") -> None:
        """Return at once."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: "SimulatedEvent") -> None:
        """Return at once."""
        observer.wait(self.name, event.moment)

    def record_event(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        """Return the event, or a new one."""
        return (event or SimulatedEvent()).record(self)

    def synchronize(self) -> None:
        """Return at once."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def __enter__(self) -> "SimulatedStream":
        _current.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _current.pop()


class SimulatedEvent:
    """An event in the place of torch.cuda.Event, which is always complete and took no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moment: Moment | None = None  # what the observer says that its stream was given before it

    def record(self, stream: SimulatedStream | None = None) -> "SimulatedEvent":
        """Return the event, as torch's generic events do."""
        self.moment = observer.moment((stream or current_stream()).name)
        return self

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Return at once."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Return at once."""
        observer.wait_on_host(self.moment)

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def elapsed_time(self, end_event: "SimulatedEvent") -> float:
        """Return 0 milliseconds."""
        return 0.0


SIMULATED_DEVICE_NAME = "simulated CUDA device"

DEFAULT_STREAM = SimulatedStream()

_current = [DEFAULT_STREAM]  # the last one is the current stream


def current_stream(device: Any = None) -> SimulatedStream:
    """Return the current stream."""
    return _current[-1]


@contextmanager
def use_stream(stream: SimulatedStream | None) -> Iterator[None]:
    """Return a context in which a stream is the current one; None leaves the current one as it is."""
    with stream or _current[-1]:
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


STAND_INS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": _nothing,
    "_lazy_init": _nothing,
    "_lazy_call": _nothing,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _nothing,
    "synchronize": _nothing,
    "current_stream": current_stream,
    "default_stream": lambda device=None: DEFAULT_STREAM,
    "stream": use_stream,
    "Stream": SimulatedStream,
    "Event": SimulatedEvent,
    "get_rng_state": _nothing,
    "set_rng_state": _nothing,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda device=None: SIMULATED_DEVICE_NAME,
    "is_bf16_supported": lambda including_emulation=True: True,
    "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    "reset_peak_memory_stats": _nothing,
    "memory_stats": lambda device=None: {"num_alloc_retries": 0},
}


@contextmanager
def cuda_api(compute_capability: int = 9) -> Iterator[None]:
    """Return a context in which torch.cuda has the stand-ins, for a device of this compute capability's first number.

    torch's rules for attention are those of sm80 and later.
    """
    capability = (compute_capability, 0)
    with mock.patch.multiple(torch.cuda, **STAND_INS, get_device_capability=lambda device=None: capability):
        yield
