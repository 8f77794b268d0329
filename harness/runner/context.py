"""The needs of a run besides its plan: the ranks' entry point, and callbacks for its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.model import ModelConfig
from harness.launcher.multinode import NodeGroup
from harness.launcher.rank_entry import worker_entry

LogFn = Callable[[str], None]  # called with one line for the user

ProgressFn = Callable[[Path], None]  # called with the run's folder several times a second while ranks run


@dataclass(frozen=True)
class RunContext:
    """The parts of a run's execution that do not change what it measures."""

    entry: Callable[[str], None] = worker_entry  # the function that every rank runs; tests replace it
    models: Sequence[ModelConfig] = ()  # candidates for the suggestion of a smaller model that would fit
    on_progress: ProgressFn = lambda _: None
    log: LogFn = lambda _: None
    nodes: NodeGroup | None = None  # the other nodes, where the machine is more than this one
