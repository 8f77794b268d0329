"""TODO harness.runner.context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.schema import ModelConfig
from harness.launcher.multinode import NodeGroup
from harness.launcher.rank_entry import worker_entry
from harness.records.schema import Rank
from harness.runner.reuse import LogFn

ProgressFn = Callable[[Path], None]  # called with the run's folder several times a second while ranks run


@dataclass(frozen=True)
class RunContext:
    """What a run is made with."""

    entry: Callable[[str], None] = worker_entry  # what every rank runs; the tests have others
    models: Sequence[ModelConfig] = ()  # named when a smaller one would fit
    on_progress: ProgressFn = lambda _: None
    log: LogFn = lambda _: None
    nodes: NodeGroup | None = None  # other nodes, where the machine is more than this one


@dataclass(frozen=True)
class Reference:
    """The single process to compare with: its rank file, or a word on why there is none; `ending` if it failed."""

    rank: Rank | None
    note: str
    failure: dict[str, Any] | None = None
