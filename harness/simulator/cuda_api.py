"""Stand-ins for the functions of torch.cuda that a CPU build lacks: one device, whose work is done at once."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_numbers = itertools.count()


class SimulatedStream:
    """A stream in the place of torch.cuda.Stream; it has nothing to wait for.

    Blocks of memory belong to the stream that is current when they are allocated, so that streams are told apart.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.number = next(_numbers)

    def wait_stream(self, stream: "SimulatedStream") -> None:
        """Return at once."""

    def wait_event(self, event: "SimulatedEvent") -> None:
        """Return at once."""

    def record_event(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        """Return the event, or a new one."""
        return event or SimulatedEvent()

    def synchronize(self) -> None:
        """Return at once."""

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
        pass

    def record(self, stream: SimulatedStream | None = None) -> "SimulatedEvent":
        """Return the event, as torch's generic events do."""
        return self

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

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


def current_stream_number() -> int:
    """Return the number of the current stream; the default stream's is 0."""
    return _current[-1].number


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
}


@contextmanager
def cuda_api(compute_capability: int = 9) -> Iterator[None]:
    """Return a context in which torch.cuda has the stand-ins, for a device of this compute capability's first number.

    torch's rules for attention are those of sm80 and later.
    """
    capability = {"get_device_capability": lambda device=None: (compute_capability, 0)}
    with ExitStack() as stack:
        for name, stand_in in (STAND_INS | capability).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        yield
