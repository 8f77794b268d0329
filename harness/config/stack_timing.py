"""How an implementation of training spends time, as data: the timing side of a stack. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StackTiming:
    """The choices of an implementation that decide the time of a step."""
