"""The log of what a CPU runs while steps are traced, a C++ library that the parent builds once."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.measure.native_allocator import build_torch_library
from harness.measure.time_breakdown import COMMUNICATION, COMPUTATION, PREFIX, TraceEvent

_SOURCE = Path(__file__).with_name("operator_log.cpp")


@dataclass(frozen=True)
class OperatorLog:
    """A log of the outermost operators of a thread, its marks, and its collectives in whichever thread they end."""

    library: ctypes.CDLL

    def begin(self) -> None:
        """Log what this thread runs from now on: its outermost operators, and all of its marks and collectives."""
        every = (PREFIX, *COMMUNICATION)
        self.library.begin_operator_log(_strings(COMPUTATION), len(COMPUTATION), _strings(every), len(every))

    def end(self) -> None:
        """Stop logging, in the thread that began."""
        self.library.end_operator_log()

    def events(self) -> list[TraceEvent]:
        """Return what was logged, in the order of its start. It is kept until the next begin()."""
        lines = self.library.operator_log_length()
        if not lines:
            return []
        pointer = ctypes.cast(self.library.operator_log_lines(), ctypes.POINTER(ctypes.c_int64))
        names = [self.library.operator_name(number).decode() for number in range(self.library.operator_name_count())]
        log = np.ctypeslib.as_array(pointer, (lines, 4))
        in_order = log[np.argsort(log[:, 1], kind="stable")].tolist()  # they are written when they end
        return [TraceEvent(names[name], start, end, "cpu_op", thread) for name, start, end, thread in in_order]


def _strings(values: Sequence[str]) -> "ctypes.Array[ctypes.c_char_p]":
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def build_operator_log(cache: Path) -> Path:
    """Return the path of the compiled library. Raise UserError or RuntimeError if it cannot be built."""
    return build_torch_library("the operator log", _SOURCE, cache, ["-O2", "-ltorch_cpu"])


def load_operator_log(path: Path) -> OperatorLog:
    """Load the library into this process."""
    import torch  # noqa: F401  loads the library whose callbacks it uses

    library = ctypes.CDLL(str(path))
    library.begin_operator_log.restype = library.end_operator_log.restype = None
    library.begin_operator_log.argtypes = [
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_int64,
    ]
    library.operator_log_lines.restype = ctypes.c_void_p
    library.operator_log_length.restype = library.operator_name_count.restype = ctypes.c_int64
    library.operator_name.restype = ctypes.c_char_p
    library.operator_name.argtypes = [ctypes.c_int64]
    return OperatorLog(library)
